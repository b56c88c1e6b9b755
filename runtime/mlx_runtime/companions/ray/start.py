"""Start Ray on this machine, or join the cluster of a job."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_runtime.companions.ray.autoscaler import Room, room
from mlx_runtime.errors import ClusterError, ConfigError, short_message
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.settings import FORKABLE, QUIET_WORKERS, Settings, environment
from mlx_runtime.workers.placement import JOB_FLAG, check_room, uses_gpus

if TYPE_CHECKING:
    from mlx_runtime.companions.jobs.options import DataConfig

EMBEDDED_RAY = {
    "RAY_prestart_worker_first_driver": "0",  # a run needs only its own workers
    "RAY_preload_python_modules": "mlx_runtime.companions.ray.preload",
}
"""Environment of the processes of an embedded Ray."""


@contextlib.contextmanager
def on_ray(cfg: TrainConfig, why: str = "") -> Iterator[Cluster]:
    """Provide Ray: in a job its cluster, otherwise an embedded Ray. `why` is the reason in the printed lines.

    Raises:
        ConfigError: the workers do not fit.
    """
    embedded, cores = JOB_FLAG not in os.environ, os.cpu_count() or 1
    with start_ray(cfg):
        import ray

        found = room(embedded=embedded)
        cpus, most, gpus = found.now(CPU=1), found.most(CPU=1), found.now(GPU=1)
        check_room(cfg, cores if embedded else most, found.most(GPU=1), cluster=not embedded)
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        yield Cluster(
            _title(found, embedded=embedded),
            cpus,
            gpus,
            engine="ray",
            host=host,
            why=why,
            use_gpu=uses_gpus(cfg, gpus),
            gpus_per_worker=cfg.gpus_per_worker,
            captures_output=False,
            reads_streams=True,
            preempted=None if embedded else preempted,
        )


@contextlib.contextmanager
def tasks_on_ray(cfg: "DataConfig") -> Iterator[str]:
    """Provide Ray for the tasks of a data job. Yield where they run.

    Raises:
        ConfigError: no node has room for a task.
    """
    embedded = JOB_FLAG not in os.environ
    with _ray(cfg.start_workers * (cfg.cpus_per_worker + 1)):
        found = room(embedded=embedded)
        refuse_no_task(cfg, found)
        yield _title(found, embedded=embedded)


def refuse_no_task(cfg: "DataConfig", found: Room) -> None:
    """Raise a ConfigError if no node of a cluster has room for a task of a data job."""
    gpus = int(cfg.use_gpu)
    if found.most(CPU=cfg.cpus_per_worker, GPU=gpus) < 1:
        raise ConfigError(
            f"no node has room for a task with cfg.cpus_per_worker={cfg.cpus_per_worker} and {gpus} GPUs: lower it, or "
            "set cfg.use_gpu=false"
        )


def _title(found: Room, *, embedded: bool) -> str:
    if embedded:
        return f"in embedded Ray on {os.cpu_count() or 1} cores"
    return f"in Ray cluster with {found.now(CPU=1)} CPUs{', which grows' if found.grows else ''}"


def preempted() -> bool:
    """Return True if a node of this run is about to be preempted. Every worker must call this."""
    from mlx_runtime.companions.ray.private import is_draining
    from mlx_runtime.distributed.collectives import agree
    from mlx_runtime.distributed.topology import device_here

    return agree([not is_draining()], device_here()) != [True]


@contextlib.contextmanager
def start_ray(cfg: TrainConfig) -> Iterator[None]:
    """Start Ray on this machine or join the cluster of the job. Does nothing if Ray is running in this process."""
    workers = cfg.elastic.max_workers or cfg.start_workers
    with _ray(workers * (cfg.cpus_per_worker + 1)):
        yield


@contextlib.contextmanager
def _ray(cpus: int) -> Iterator[None]:
    import ray

    if ray.is_initialized():
        yield
        return
    level = "INFO" if Settings.read().verbose else "ERROR"
    with contextlib.ExitStack() as stack:
        if JOB_FLAG in os.environ:
            ray.init(logging_level=level, log_to_driver=True)
        else:
            _start_embedded(cpus, level)
        stack.callback(ray.shutdown)
        yield


def _start_embedded(cpus: int, level: str) -> None:
    import ray

    from mlx_runtime.companions.ray.private import bare_head

    if not Settings.read().quiet:
        print(f"ray       starting on {os.cpu_count()} cores", flush=True)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # for Ray's processes, which are not forks
        if os.environ.get(name) == FORKABLE[name]:
            del os.environ[name]
    # Ray places workers by logical CPUs: with more of them than cores, any number of workers runs on a laptop.
    # Some are for Ray Data.
    cpus = max(os.cpu_count() or 1, cpus + 2)
    try:
        with environment(EMBEDDED_RAY if Settings.read().verbose else EMBEDDED_RAY | QUIET_WORKERS), bare_head():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level, log_to_driver=True)
    except Exception as error:  # Ray raises various types of exceptions
        why = f"Ray did not start on this machine: {short_message(error)}"
        raise ClusterError(f"{why}\nIf the machine is busy, try again; --verbose shows Ray's output") from error
