"""Where a run trains: in this process, on this machine, or on Ray, started here or joined."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_runtime.config import DataConfig, EngineName, TrainConfig
from mlx_runtime.errors import ClusterError, ConfigError, first_line
from mlx_runtime.settings import Settings, release_threads

JOB_FLAG = "MLX_IN_JOB"
"""Set in the environment of a submitted job: there the driver joins the cluster that it runs on."""


@dataclass(frozen=True)
class Cluster:
    """Where a run trains.

    Attributes:
        title: for the start lines, like `embedded Ray on 2 cores`.
        embedded: whether Ray was started here, for this run.
        host: address of the driver as workers reach it.
        cpus, gpus: what there is; 0 CPUs when training runs inside this process.
        engine: that starts the workers.
        why: this engine is not the usual one here, for the start lines; empty if it is.
        use_gpu: each worker trains on a GPU.
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
    """Provide what the run trains on: Ray if `engine_for` chooses it, otherwise this machine.

    Raises:
        ConfigError: this machine or cluster lacks what `cfg` asks for, or `cfg.engine` cannot train it.
    """
    engine, why = engine_for(cfg)
    if engine == "ray":
        with on_ray(cfg, why) as cluster:
            yield cluster
    else:
        yield _this_machine(cfg, engine)


def engine_for(cfg: TrainConfig | DataConfig) -> tuple[EngineName, str]:
    """The engine that `cfg` means here, and why it is not the usual one.

    Raises:
        ConfigError: `cfg.engine` cannot train it.
    """
    in_job = JOB_FLAG in os.environ
    if cfg.start_workers == 0:
        if cfg.engine != "auto" and not isinstance(cfg, DataConfig):
            raise ConfigError(
                f"cfg.engine={cfg.engine} needs workers, but cfg.start_workers=0 starts none; "
                "use cfg.engine=auto or cfg.start_workers=1"
            )
        return "in_process", ""
    if cfg.engine == "local":
        if in_job:
            raise ConfigError("cfg.engine=local trains on one machine, not in a cluster's job; use cfg.engine=auto")
        reason = needs_ray(cfg)
        if reason:
            raise ConfigError(f"cfg.engine=local cannot train this: {reason}; use cfg.engine=auto")
        return "local", ""
    if cfg.engine == "ray":
        return "ray", "" if in_job or isinstance(cfg, DataConfig) else "cfg.engine=ray"
    if in_job:
        return "ray", ""
    reason = needs_ray(cfg)
    return ("ray", reason) if reason else ("local", "")


def needs_ray(cfg: TrainConfig | DataConfig) -> str:
    """Why only Ray can train with these settings; empty if the local engine can, too."""
    for name in ("min_workers", "max_workers"):
        value = getattr(cfg, name)
        if value not in (None, cfg.start_workers):
            return f"cfg.{name}={value} lets the number of workers change"
    loader = getattr(cfg, "loader", "auto")
    if loader.partition("=")[0] == "ray":
        return f"cfg.loader={loader} reads in Ray's processes"
    return ""


def _this_machine(cfg: TrainConfig | DataConfig, engine: EngineName) -> Cluster:
    cores = os.cpu_count() or 1
    _check_threads(cfg, cores)
    if isinstance(cfg, DataConfig):  # its code takes the devices that it finds
        return Cluster("0: in this process", False, "127.0.0.1", 0, 0, engine)
    import torch

    gpus = torch.cuda.device_count()
    use_gpu = uses_gpus(cfg, max(1, cfg.start_workers), gpus)
    if engine == "in_process":
        return Cluster("0: training in this process", False, "127.0.0.1", 0, gpus, engine, use_gpu=use_gpu)
    return Cluster(f"on {cores} cores", False, "127.0.0.1", cores, gpus, engine, use_gpu=use_gpu)


def _check_threads(cfg: TrainConfig | DataConfig, cores: int) -> None:
    if cfg.cpus_per_worker > cores:
        raise ConfigError(f"cfg.cpus_per_worker={cfg.cpus_per_worker}, but this machine has {cores} cores")


def uses_gpus(cfg: TrainConfig | DataConfig, workers: int, gpus: float) -> bool:
    """Whether each of some workers gets a GPU.

    Raises:
        ConfigError: `cfg.use_gpu` asks for more than there are.
    """
    if cfg.use_gpu and workers > gpus:
        cure = "leave cfg.use_gpu at null to use what there is"
        found = f"there {'is' if gpus == 1 else 'are'} {gpus:g}"
        users = f"each of {workers} workers" if cfg.start_workers else "this process"
        advice = f"Lower cfg.start_workers, or {cure}" if cfg.start_workers > 1 else cure.capitalize()
        raise ConfigError(f"cfg.use_gpu=true needs a GPU for {users}; {found}. {advice}")
    return gpus >= workers if cfg.use_gpu is None else cfg.use_gpu


@contextlib.contextmanager
def on_ray(cfg: TrainConfig | DataConfig, why: str = "") -> Iterator[Cluster]:
    """Have Ray while the block runs: the job's cluster inside a job, else an embedded one.

    Args:
        cfg: what must fit in it.
        why: it is Ray, for the start lines.

    Raises:
        ConfigError: the cluster cannot hold `start_workers`.
    """
    embedded = JOB_FLAG not in os.environ
    if embedded:
        _check_threads(cfg, os.cpu_count() or 1)
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
        use_gpu = uses_gpus(cfg, least, gpus)
        title = f"in embedded Ray on {os.cpu_count()} cores" if embedded else f"in Ray cluster with {cpus:g} CPUs"
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        yield Cluster(title, embedded, host, cpus, gpus, "ray", why, use_gpu)


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
        release_threads()  # what Ray starts has cores of its own
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # workers that Ray Train would not use
        os.environ.setdefault("RAY_preload_python_modules", "mlx_runtime.engines.ray_preload")
        most = cfg.max_workers or cfg.start_workers
        needed = most * (cfg.cpus_per_worker + 1) + 2  # some for Ray Data and `cfg.loader=ray`, too
        cpus = max(os.cpu_count() or 1, needed)
        with _address_known_to_children():
            try:
                ray.init(
                    address="local", num_cpus=cpus, include_dashboard=False, logging_level=level, log_to_driver=True
                )
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
