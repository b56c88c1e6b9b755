"""Choose where a run trains: in this process, on this machine, or on Ray, embedded or an existing cluster."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mlx_runtime.errors import ClusterError, ConfigError, short_message
from mlx_runtime.settings import QUIET_WORKERS, Settings, environment, release_threads
from mlx_runtime.training.options import DataConfig, EngineName, TrainConfig

JOB_FLAG = "MLX_IN_JOB"
"""Environment variable of a submitted job: its driver joins the cluster that it runs on."""

EMBEDDED_RAY = {
    "RAY_prestart_worker_first_driver": "0",  # Ray Train would not use them
    "RAY_preload_python_modules": "mlx_runtime.training.engines.ray_preload",
}
"""For the processes that an embedded Ray starts."""


@dataclass(frozen=True)
class Cluster:
    """Where a run trains."""

    title: str  # for the start lines, like `in embedded Ray on 2 cores`
    embedded: bool  # True if this process started Ray for the run
    host: str  # address of the driver as seen by workers
    cpus: float  # in total; 0 when training runs inside this process
    gpus: float  # in total
    engine: EngineName = "ray"
    why: str = ""  # reason for an engine other than the default; empty for the default
    use_gpu: bool = False  # True if each worker trains on a GPU
    gpu_share: float = 1.0  # of that GPU, which others may share


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
    limits = {"min_workers": cfg.min_workers, "max_workers": cfg.max_workers}
    changing = [f"cfg.{name}={limit}" for name, limit in limits.items() if limit not in (None, cfg.start_workers)]
    reason = f"{changing[0]} lets the number of workers change" if changing else ""
    if cfg.engine == "local":
        if in_job:
            raise ConfigError("cfg.engine=local trains on one machine, not in a cluster's job; use cfg.engine=auto")
        if reason:
            raise ConfigError(f"cfg.engine=local cannot train this: {reason}; use cfg.engine=auto")
        return "local", ""
    if in_job or data_job:
        return "ray", ""
    if cfg.engine == "ray":
        return "ray", "cfg.engine=ray"
    return ("ray", reason) if reason else ("local", "")


class Shortage(NamedTuple):
    """What the workers of a run lack, and how to make them fit; both without a final period."""

    text: str
    hint: str


def shortage(cfg: TrainConfig | DataConfig, cpus: float, gpus: float, *, cluster: bool) -> Shortage | None:
    """Return what the smallest group of workers lacks, or None if it fits.

    Workers reserve the CPUs of a cluster. On one machine, they may outnumber its cores.
    """
    holder = "the cluster" if cluster else "this machine"
    name = "min_workers" if cfg.min_workers else "start_workers"
    workers = max(1, cfg.min_workers or cfg.start_workers)
    if cluster and workers * cfg.cpus_per_worker > cpus:
        text = f"cfg.{name}={workers} needs {workers * cfg.cpus_per_worker} CPUs; {holder} has {cpus:g} CPUs"
        return Shortage(text, f"Lower cfg.{name} or cfg.cpus_per_worker")
    if cfg.cpus_per_worker > cpus:
        return Shortage(f"cfg.cpus_per_worker={cfg.cpus_per_worker}, but {holder} has {cpus:g} cores", "Lower it")
    if cfg.use_gpu and workers > gpus:
        users = f"each of {workers} workers" if cfg.start_workers else "this process"
        hint = "eave cfg.use_gpu at null to use what there is"
        return Shortage(
            f"cfg.use_gpu=true needs a GPU for {users}; {holder} has {gpus:g}",
            f"Lower cfg.{name}, or l{hint}" if cfg.start_workers > 1 else f"L{hint}",
        )
    return None


def uses_gpus(cfg: TrainConfig | DataConfig, gpus: float) -> bool:
    """Return True if each worker gets a GPU: as `cfg.use_gpu` specifies, or by default if there are enough."""
    return gpus >= max(1, cfg.min_workers or cfg.start_workers) if cfg.use_gpu is None else cfg.use_gpu


def _check(cfg: TrainConfig | DataConfig, cpus: float, gpus: float, *, cluster: bool) -> None:
    lacking = shortage(cfg, cpus, gpus, cluster=cluster)
    if lacking:
        raise ConfigError(f"{lacking.text}. {lacking.hint}")


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


@contextlib.contextmanager
def on_ray(cfg: TrainConfig | DataConfig, why: str = "", *, forward: bool = True) -> Iterator[Cluster]:
    """Provide Ray: the job's cluster inside a job, otherwise an embedded one. `why` is for the start lines.

    With `forward`, this process prints what the processes of the cluster print.

    Raises:
        ConfigError: the workers do not fit.
    """
    embedded, cores = JOB_FLAG not in os.environ, os.cpu_count() or 1
    with start_ray(cfg, forward=forward):
        import ray

        total = ray.cluster_resources()
        cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
        _check(cfg, cores if embedded else cpus, gpus, cluster=not embedded)
        title = f"in embedded Ray on {cores} cores" if embedded else f"in Ray cluster with {cpus:g} CPUs"
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        yield Cluster(title, embedded, host, cpus, gpus, "ray", why, uses_gpus(cfg, gpus))


@contextlib.contextmanager
def start_ray(cfg: TrainConfig | DataConfig, *, forward: bool = True) -> Iterator[None]:
    """Start Ray on this machine or join the cluster of the job. Does nothing if Ray is running in this process."""
    import ray

    if ray.is_initialized():
        yield
        return
    level = "INFO" if Settings.read().verbose else "ERROR"
    with contextlib.ExitStack() as stack:
        if JOB_FLAG in os.environ:
            # Ray Train's PlacementGroupCleaner looks for "the" cluster, and fails on machines with several.
            known = {name: os.environ[name] for name in ("RAY_ADDRESS",) if "://" not in os.environ.get(name, "://")}
            ray.init(logging_level=level, log_to_driver=forward, runtime_env={"env_vars": known})
        else:
            # Nobody preempts this machine. Ray Train's controller, in this process, reads this.
            stack.enter_context(environment({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}))
            _start_embedded(cfg, level)
        stack.callback(ray.shutdown)
        yield


def _start_embedded(cfg: TrainConfig | DataConfig, level: str) -> None:
    import ray

    if not Settings.read().quiet:
        print(f"ray       starting on {os.cpu_count()} cores", flush=True)
    release_threads()  # processes of Ray are not limited to the cores of this one
    # Ray places workers by logical CPUs: with more of them than cores, any number of workers runs on a laptop.
    # Some are for Ray Data.
    needed = (cfg.max_workers or cfg.start_workers) * (cfg.cpus_per_worker + 1) + 2
    cpus = max(os.cpu_count() or 1, needed)
    try:
        with environment(EMBEDDED_RAY if Settings.read().verbose else EMBEDDED_RAY | QUIET_WORKERS):
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level, log_to_driver=True)
    except Exception as error:  # Ray raises various types of exceptions
        why = f"Ray did not start on this machine: {short_message(error)}"
        raise ClusterError(f"{why}\nIf the machine is busy, try again; --verbose shows Ray's output") from error
