"""Choose where a run trains: in this process, on this machine, or on Ray, embedded or an existing cluster."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_runtime.errors import ClusterError, ConfigError, short_message
from mlx_runtime.settings import QUIET_WORKERS, Settings, environment, release_threads
from mlx_runtime.training.engines.capacity import shortage, uses_gpus
from mlx_runtime.training.options import DataConfig, EngineName, TrainConfig

JOB_FLAG = "MLX_IN_JOB"
"""Environment variable of a submitted job: its driver joins the cluster that it runs on."""


@dataclass(frozen=True)
class Cluster:
    """Where a run trains.

    Attributes:
        title: Text for the start lines, like `in embedded Ray on 2 cores`.
        embedded: True if this process started Ray for the run.
        host: Address of the driver as seen by workers.
        cpus, gpus: Number of CPUs and GPUs in total; 0 CPUs when training runs inside this process.
        engine: Name of the engine that starts the workers.
        why: Reason for an engine other than the default; empty for the default.
        use_gpu: True if each worker trains on a GPU.
    """

    title: str
    embedded: bool
    host: str
    cpus: float
    gpus: float
    engine: EngineName = "ray"
    why: str = ""
    use_gpu: bool = False


@contextlib.contextmanager
def connect(cfg: TrainConfig | DataConfig) -> Iterator[Cluster]:
    """Provide the machine or cluster that the run trains on.

    Raises:
        ConfigError: the workers do not fit, or `cfg.engine` cannot train them.
    """
    engine, why = engine_for(cfg)
    if engine == "ray":
        with on_ray(cfg, why) as cluster:
            yield cluster
    else:
        yield _this_machine(cfg, engine)


def engine_for(cfg: TrainConfig | DataConfig) -> tuple[EngineName, str]:
    """Return the engine to use, and the reason if it is not the default.

    Raises:
        ConfigError: `cfg.engine` cannot train with these settings.
    """
    in_job, data_job = JOB_FLAG in os.environ, isinstance(cfg, DataConfig)
    if cfg.start_workers == 0:
        if cfg.engine != "auto" and not data_job:
            raise ConfigError(
                f"cfg.engine={cfg.engine} needs workers, but cfg.start_workers=0 starts none; "
                "use cfg.engine=auto or cfg.start_workers=1"
            )
        return "in_process", ""
    reason = _needs_ray(cfg)
    if cfg.engine == "local":
        if in_job:
            raise ConfigError("cfg.engine=local trains on one machine, not in a cluster's job; use cfg.engine=auto")
        if reason:
            raise ConfigError(f"cfg.engine=local cannot train this: {reason}; use cfg.engine=auto")
        return "local", ""
    if cfg.engine == "ray":
        return "ray", "" if in_job or data_job else "cfg.engine=ray"
    if in_job:
        return "ray", ""
    return ("ray", reason) if reason else ("local", "")


def _needs_ray(cfg: TrainConfig | DataConfig) -> str:
    """Return why only Ray can train with these settings; empty if the local engine can."""
    for name in ("min_workers", "max_workers"):
        value = getattr(cfg, name)
        if value not in (None, cfg.start_workers):
            return f"cfg.{name}={value} lets the number of workers change"
    return ""


def _this_machine(cfg: TrainConfig | DataConfig, engine: EngineName) -> Cluster:
    cores = os.cpu_count() or 1
    if isinstance(cfg, DataConfig):  # user code chooses its device
        _check(cfg, cores, math.inf, cluster=False)
        return Cluster("0: in this process", False, "127.0.0.1", 0, 0, engine)
    import torch

    gpus = torch.cuda.device_count()
    _check(cfg, cores, gpus, cluster=False)
    title, cpus = ("0: training in this process", 0) if engine == "in_process" else (f"on {cores} cores", cores)
    return Cluster(title, False, "127.0.0.1", cpus, gpus, engine, use_gpu=uses_gpus(cfg, gpus))


def _check(cfg: TrainConfig | DataConfig, cpus: float, gpus: float, *, cluster: bool) -> None:
    lacking = shortage(cfg, cpus, gpus, cluster=cluster)
    if lacking:
        raise ConfigError(f"{lacking.text}. {lacking.hint}")


@contextlib.contextmanager
def on_ray(cfg: TrainConfig | DataConfig, why: str = "") -> Iterator[Cluster]:
    """Provide Ray: the job's cluster inside a job, otherwise an embedded one.

    Args:
        cfg: Settings of the run.
        why: Reason for using Ray, for the start lines.

    Raises:
        ConfigError: the workers do not fit.
    """
    embedded, cores = JOB_FLAG not in os.environ, os.cpu_count() or 1
    with start_ray(cfg):
        import ray

        total = ray.cluster_resources()
        cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
        _check(cfg, cores if embedded else cpus, gpus, cluster=not embedded)
        title = f"in embedded Ray on {cores} cores" if embedded else f"in Ray cluster with {cpus:g} CPUs"
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        yield Cluster(title, embedded, host, cpus, gpus, "ray", why, uses_gpus(cfg, gpus))


@contextlib.contextmanager
def start_ray(cfg: TrainConfig | DataConfig) -> Iterator[None]:
    """Start Ray on this machine or join the cluster of the job. Does nothing if Ray is running in this process."""
    import ray

    if ray.is_initialized():
        yield
        return
    level = "INFO" if Settings.read().verbose else "ERROR"
    if JOB_FLAG in os.environ:
        # Ray Train's PlacementGroupCleaner looks for "the" cluster, and fails on machines with several.
        known = {name: os.environ[name] for name in ("RAY_ADDRESS",) if "://" not in os.environ.get(name, "://")}
        ray.init(logging_level=level, log_to_driver=True, runtime_env={"env_vars": known})
    else:
        _start_embedded(cfg, level)
    try:
        yield
    finally:
        ray.shutdown()


def _start_embedded(cfg: TrainConfig | DataConfig, level: str) -> None:
    import ray

    if not Settings.read().quiet:
        print(f"ray       starting on {os.cpu_count()} cores", flush=True)
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody preempts this machine
    release_threads()  # Ray's processes have cores of their own
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # Ray Train would not use them
    os.environ.setdefault("RAY_preload_python_modules", "mlx_runtime.training.engines.ray_preload")
    # Ray places workers by logical CPUs: with more of them than cores, any number of workers runs on a laptop.
    # Some are for Ray Data.
    needed = (cfg.max_workers or cfg.start_workers) * (cfg.cpus_per_worker + 1) + 2
    cpus = max(os.cpu_count() or 1, needed)
    quiet = {} if Settings.read().verbose else QUIET_WORKERS
    try:
        with environment(quiet):
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level, log_to_driver=True)
    except Exception as error:  # Ray raises no particular type
        why = f"Ray did not start on this machine: {short_message(error)}"
        raise ClusterError(f"{why}\nIf the machine is busy, try again; --verbose shows Ray's output") from error
