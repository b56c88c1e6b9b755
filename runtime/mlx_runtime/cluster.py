"""Ray, started here or joined: the embedded cluster of `mlx train run`, or the one that a job runs on."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_runtime.config import DataConfig, TrainConfig
from mlx_runtime.errors import ClusterError, ConfigError, first_line
from mlx_runtime.settings import Settings

JOB_FLAG = "MLX_IN_JOB"
"""Set in the environment of a submitted job: there the driver joins the cluster that it runs on."""


@dataclass(frozen=True)
class Cluster:
    """Where a run trains.

    Attributes:
        title: for the start lines, like `embedded Ray on 2 cores`.
        embedded: whether it was started here, for this run.
        host: address of the driver as workers reach it.
        cpus, gpus: what the cluster has; 0 CPUs when training runs inside this process.
    """

    title: str
    embedded: bool
    host: str
    cpus: float
    gpus: float


@contextlib.contextmanager
def connect(cfg: TrainConfig | DataConfig) -> Iterator[Cluster]:
    """Have Ray while the block runs: none for `start_workers=0`, the job's cluster inside a job, else an embedded one.

    Raises:
        ConfigError: the cluster cannot hold `start_workers`.
    """
    if cfg.start_workers == 0:
        import torch

        yield Cluster("0: training in this process", False, "127.0.0.1", 0, torch.cuda.device_count())
        return
    embedded = JOB_FLAG not in os.environ
    with start_ray(cfg):
        import ray

        total = ray.cluster_resources()
        cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
        name, least = ("min_workers", cfg.min_workers) if cfg.min_workers else ("start_workers", cfg.start_workers)
        wanted = least * cfg.cpus_per_worker
        if wanted > cpus:
            raise ConfigError(
                f"cfg.{name}={least} needs {wanted} CPUs; the cluster has {cpus:g}. "
                "Lower cfg.start_workers or cfg.cpus_per_worker"
            )
        if cfg.use_gpu and least > gpus:
            raise ConfigError(
                f"cfg.use_gpu=true needs a GPU for each of {least} workers; the cluster has {gpus:g}. "
                "Lower cfg.start_workers, or leave cfg.use_gpu at null to use what there is"
            )
        title = f"embedded Ray on {os.cpu_count()} cores" if embedded else f"Ray cluster with {cpus:g} CPUs"
        yield Cluster(title, embedded, "127.0.0.1" if embedded else ray.util.get_node_ip_address(), cpus, gpus)


@contextlib.contextmanager
def start_ray(cfg: TrainConfig | DataConfig) -> Iterator[None]:
    """Start Ray on this machine while the block runs, or join the cluster of the job; nothing if that was done."""
    import ray

    if ray.is_initialized():
        yield
        return
    level = "INFO" if Settings.read().verbose else "ERROR"
    if JOB_FLAG in os.environ:
        # One of Ray Train's helpers looks for "the" cluster by itself, and errs on machines with several.
        known = {name: os.environ[name] for name in ("RAY_ADDRESS",) if "://" not in os.environ.get(name, "://")}
        ray.init(logging_level=level, log_to_driver=True, runtime_env={"env_vars": known})
    else:
        # Ray places workers by logical CPUs. More of them than cores lets any number of workers run on a laptop.
        if not Settings.read().quiet:
            print(f"ray       starting on {os.cpu_count()} cores", flush=True)
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody preempts this machine
        most = cfg.max_workers or cfg.start_workers
        needed = most * (cfg.cpus_per_worker + 1) + 2  # some for Ray Data and `cfg.loader=ray`, too
        cpus = max(os.cpu_count() or 1, needed)
        with _address_known_to_children():
            try:
                ray.init(address="local", num_cpus=cpus, logging_level=level, log_to_driver=True)
            except Exception as error:  # Ray has no type of its own for it
                why = f"Ray did not start on this machine: {first_line(error)}"
                raise ClusterError(f"{why}\nIf it is only busy, try again; --verbose shows what Ray says") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _address_known_to_children() -> Iterator[None]:
    """Let every process of the embedded cluster inherit its address.

    One of Ray Train's helpers looks for "the" cluster of the machine by itself, and fails where there are several.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    import ray

    settings = {"RAY_GCS_SERVER_PORT": str(port), "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
