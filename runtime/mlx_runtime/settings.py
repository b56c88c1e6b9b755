"""Environment variables: those set by users and clusters, and those needed by Ray and forked workers."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

STEADY_RAY = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the experiment folder, so that relative data paths work
    "RAY_worker_niceness": "0",  # with Ray's default of 15, other processes on the machine slow training down
}
"""Ray's settings that make training predictable."""

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SCHEDULER_EVENTS": "0",  # of the autoscaler; drivers report what a run waits for
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",  # errors arrive as exceptions
}
"""Ray's settings that keep its own output off the terminal."""

QUIET_HUGGING_FACE = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Turns off progress bars, which are unreadable between the lines of several workers."""

QUIET_WORKERS = {"PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning"}
"""For the processes that an embedded Ray starts: users who train do not need warnings from libraries."""

FORKABLE = {
    "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads when imported, and a process with threads cannot fork
    "OMP_NUM_THREADS": "1",  # as torchrun sets it; cfg.cpus_per_worker sets torch's own threads
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counts GPUs without initializing CUDA, which does not survive a fork
}
"""Keeps a driver that imports torch and the experiment able to fork its workers."""


@dataclass(frozen=True)
class Settings:
    """Settings that are not part of conf.yaml."""

    storage: str | None  # MLX_STORAGE: a storage path that overrides the one in conf.yaml; empty counts as not set
    verbose: bool  # MLX_VERBOSE=1: show Ray's output
    quiet: bool  # MLX_QUIET=1: print only the folder of a run and its outcome
    debug: bool  # MLX_DEBUG=1: show tracebacks of our own errors
    cache: Path  # MLX_CACHE: a local folder for copies of prepared datasets in object stores
    spawn: bool  # MLX_START_METHOD=spawn: start local workers as fresh interpreters instead of forks
    on: str | None  # MLX_ON: key of the frames of a command that runs here for another machine, see `ray.frames`
    job: dict[str, str] | None  # MLX_JOB and MLX_JOB_ADDRESS: id and cluster of the job that this process belongs to

    @classmethod
    def read(cls) -> "Settings":
        job = os.environ.get("MLX_JOB")
        return cls(
            storage=os.environ.get("MLX_STORAGE", "").strip() or None,  # Makefiles export unset variables as empty
            verbose=_on("MLX_VERBOSE"),
            quiet=_on("MLX_QUIET"),
            debug=_on("MLX_DEBUG"),
            cache=Path(os.environ.get("MLX_CACHE") or Path.home() / ".cache" / "mlx"),
            spawn=os.environ.get("MLX_START_METHOD") == "spawn",
            on=os.environ.get("MLX_ON"),
            job={"id": job, "address": os.environ.get("MLX_JOB_ADDRESS", "")} if job else None,
        )


def prepare_ray() -> None:
    """Set the variables that Ray and Hugging Face read on import, except those that the user has set."""
    quiet = {} if Settings.read().verbose else QUIET_RAY | QUIET_HUGGING_FACE
    for name, value in (STEADY_RAY | quiet).items():
        os.environ.setdefault(name, value)


def prepare_fork() -> None:
    """Set the variables that keep this process able to fork workers, except those that the user has set."""
    for name, value in FORKABLE.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def environment(variables: Mapping[str, str], *, replace: bool = False) -> Iterator[None]:
    """Set environment variables within the block; those already set change only with `replace`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if replace or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def be_verbose() -> None:
    """Show Ray's output, in this process and in those that it starts; for `--verbose`."""
    os.environ["MLX_VERBOSE"] = "1"
    for name, value in (QUIET_RAY | QUIET_HUGGING_FACE).items():
        if os.environ.get(name) == value:
            del os.environ[name]


def be_quiet() -> None:
    """Print little, in this process and in those that it starts; for `--quiet`."""
    os.environ["MLX_QUIET"] = "1"


def _on(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
