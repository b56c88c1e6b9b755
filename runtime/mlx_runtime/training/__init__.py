"""One run: the driver, the workers, and the session that user code calls."""

from mlx_runtime.importing import door
from mlx_runtime.settings import prepare_ray

prepare_ray()  # before user code imports Ray or a library of Hugging Face

__all__, __getattr__ = door(
    __name__,
    console_lines="ConsoleLines",
    driver="Driver",
    extensions="AccompaniedRun Listener",
    job_options="DataConfig",
    options="TrainConfig minimums",
    planning="check_datasets connect prepare_run",
    positions="ANSWER_S answer_request read_answer",
    request="Request RunConfig load_config",
    resuming="set_group_values with_settings",
    stop_requests="DRIVER_SIGNALS StopRequests Terminated held_signals interrupt_main sigterm_stops",
    terminal="fit",
    watchdog="Watchdog",
)
