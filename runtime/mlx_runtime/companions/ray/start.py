"""Start Ray on this machine, or join the cluster of a job."""

import contextlib
import math
import os
from collections.abc import Iterator

from mlx_runtime.companions.ray.autoscaler import room
from mlx_runtime.driver.job_options import DataConfig
from mlx_runtime.errors import ClusterError, short_message
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.settings import QUIET_WORKERS, Settings, environment, release_threads
from mlx_runtime.workers.placement import JOB_FLAG, check_room, uses_gpus

EMBEDDED_RAY = {
    "RAY_prestart_worker_first_driver": "0",  # a run needs only its own workers
    "RAY_preload_python_modules": "mlx_runtime.companions.ray.preload",
}
"""Environment of the processes of an embedded Ray."""


@contextlib.contextmanager
def on_ray(cfg: TrainConfig | DataConfig, why: str = "", *, forward: bool = True) -> Iterator[Cluster]:
    """Provide Ray: in a job its cluster, otherwise an embedded Ray. `why` is the reason in the printed lines.

    With `forward`, this process prints the output of the cluster's processes.

    Raises:
        ConfigError: the workers do not fit.
    """
    embedded, cores = JOB_FLAG not in os.environ, os.cpu_count() or 1
    with start_ray(cfg, forward=forward):
        import ray

        found = room(embedded=embedded)
        cpus, most, gpus = found.now(CPU=1), found.most(CPU=1), found.gpus
        check_room(cfg, cores if embedded else most, found.most(GPU=1), cluster=not embedded)
        title = f"in embedded Ray on {cores} cores" if embedded else f"in Ray cluster with {cpus} CPUs"
        if not embedded and found.grows:
            title += ", which grows" if math.isinf(most) else f", which grows to {most:g}"
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        yield Cluster(
            title,
            cpus,
            gpus,
            engine="ray",
            host=host,
            why=why,
            use_gpu=uses_gpus(cfg, gpus),
            gpus_per_worker=cfg.gpus_per_worker,
            shares_cores=embedded,
            captures_output=False,
            reads_streams=True,
            preempted=None if embedded else preempted,
        )


def preempted() -> bool:
    """Return True if a node of this run is about to be preempted. Every worker must call this."""
    from mlx_runtime.companions.ray.private import is_draining
    from mlx_runtime.distributed.collectives import agree
    from mlx_runtime.distributed.topology import device_here

    return agree([not is_draining()], device_here()) != [True]


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
            ray.init(logging_level=level, log_to_driver=forward)
        else:
            _start_embedded(cfg, level)
        stack.callback(ray.shutdown)
        yield


def _start_embedded(cfg: TrainConfig | DataConfig, level: str) -> None:
    import ray

    from mlx_runtime.companions.ray.private import bare_head

    if not Settings.read().quiet:
        print(f"ray       starting on {os.cpu_count()} cores", flush=True)
    release_threads()  # processes of Ray are not limited to the cores of this one
    # Ray places workers by logical CPUs: with more of them than cores, any number of workers runs on a laptop.
    # Some are for Ray Data.
    needed = (cfg.elastic.max_workers or cfg.start_workers) * (cfg.cpus_per_worker + 1) + 2
    cpus = max(os.cpu_count() or 1, needed)
    try:
        with environment(EMBEDDED_RAY if Settings.read().verbose else EMBEDDED_RAY | QUIET_WORKERS), bare_head():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level, log_to_driver=True)
    except Exception as error:  # Ray raises various types of exceptions
        why = f"Ray did not start on this machine: {short_message(error)}"
        raise ClusterError(f"{why}\nIf the machine is busy, try again; --verbose shows Ray's output") from error
