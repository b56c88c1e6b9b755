"""Runs from Python: `run`, functions of a `Trainer`, actors, and cells of notebooks."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    calls="run_settings",
    function_runs="Trainer reattach",
    functions=(
        "FunctionExperiment accelerate get_dataset_shard load_checkpoint load_function local_rank report "
        "save_checkpoint world_rank world_size"
    ),
    magic="register",
    runs="importable require_list run",
)
