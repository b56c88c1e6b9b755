"""The environment, read once: what a person or a cluster says outside conf.yaml."""

import os
from dataclasses import dataclass
from pathlib import Path

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints every line of a worker twice
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",  # what goes wrong comes as an exception
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
}

FORKABLE = {
    "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads as it is imported, and a process with threads cannot fork
    "OMP_NUM_THREADS": "1",  # as torchrun sets it; torch's own threads are those of cfg.cpus_per_worker
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs does not initialize CUDA, which does not survive a fork
}
"""What keeps a driver that imports torch and the experiment able to fork its workers."""

_set_here: set[str] = set()

STEADY_RAY = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the experiment folder, so relative data paths work
    "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the machine hold up training
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # a report waits for the controller's next poll; Ray's default is 2 s
}


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        storage: `MLX_STORAGE`, a storage path that wins over the one in conf.yaml; empty counts as not set.
        verbose: `MLX_VERBOSE=1`, show what Ray prints.
        quiet: `MLX_QUIET=1`, print of a run only its folder and how it ended.
        debug: `MLX_DEBUG=1`, show tracebacks of our own errors.
        cache: `MLX_CACHE`, a folder of this machine for copies of prepared sets from object stores.
        spawn: `MLX_START_METHOD=spawn`, start workers on this machine as fresh interpreters instead of forks.
        job: `MLX_JOB` and `MLX_JOB_ADDRESS`, id and cluster of the job that this process belongs to, or None.
    """

    storage: str | None
    verbose: bool
    quiet: bool
    debug: bool
    cache: Path
    spawn: bool
    job: dict[str, str] | None

    @classmethod
    def read(cls) -> "Settings":
        job = os.environ.get("MLX_JOB")
        return cls(
            storage=os.environ.get("MLX_STORAGE", "").strip() or None,  # Makefiles export variables that nobody has set
            verbose=_on("MLX_VERBOSE"),
            quiet=_on("MLX_QUIET"),
            debug=_on("MLX_DEBUG"),
            cache=Path(os.environ.get("MLX_CACHE") or Path.home() / ".cache" / "mlx"),
            spawn=os.environ.get("MLX_START_METHOD") == "spawn",
            job={"id": job, "address": os.environ.get("MLX_JOB_ADDRESS", "")} if job else None,
        )


def prepare_ray() -> None:
    """Set the environment that Ray reads when it is imported; what the user has set stays."""
    for name, value in (STEADY_RAY if Settings.read().verbose else STEADY_RAY | QUIET_RAY).items():
        os.environ.setdefault(name, value)


def prepare_fork() -> None:
    """Set the environment that keeps this process able to fork workers; what the user has set stays."""
    for name, value in FORKABLE.items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)


def release_threads() -> None:
    """Take back the limits of threads that `prepare_fork` has set: this process has read them, others need not."""
    for name in _set_here & {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}:
        os.environ.pop(name, None)
    _set_here.clear()


def be_verbose() -> None:
    """`--verbose`: let Ray print what it likes, here and in every process started from here."""
    os.environ["MLX_VERBOSE"] = "1"
    for name, value in QUIET_RAY.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def be_quiet() -> None:
    """`--quiet`: print little, here and in every process started from here."""
    os.environ["MLX_QUIET"] = "1"


def _on(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
