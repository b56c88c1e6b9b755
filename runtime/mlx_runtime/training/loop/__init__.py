"""The worker of a run: the experiment, its loop and its steps, and messages to the driver."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    breakpoints="at_breakpoint no_pdb",
    channel="LOCATE STOP Direct Inbox NoWorkers address_towards",
    connections="Listener Receiver Remote",
    examples="EXAMPLES",
    experiment="BaseModule attach",
    forward="HALF compile_forward recompute",
    losses="Mean",
    memory="needs_of_config states_after_step ways_to_save",
    optimization="prepare_models",
    stopping="LoopStopped",
    worker="enter_ray_train loop_errors train_to",
)
