"""The choice of an engine: in this process, on this machine, or on Ray, embedded or on an existing cluster."""

import os
from typing import TYPE_CHECKING

from mlx_runtime.config.constructors.targets import named_class
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import ENGINES

if TYPE_CHECKING:
    from mlx_runtime.loop.options import TrainConfig
    from mlx_runtime.workers.protocol import EngineClass

JOB_FLAG = "MLX_IN_JOB"
"""Environment variable of submitted jobs, whose drivers join the cluster that they run on."""

WORKER_FLAG = "MLX_WORKER"
"""Environment variable of workers on Ray, which have torchrun's variables, too."""

WORKERS_PER_CORE = 32
"""How many workers may share a core of one machine; they are processes, which need memory even if they wait."""


def is_launched() -> bool:
    """Return True if torchrun, or `srun` with the same variables, has started this process as a worker."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() and WORKER_FLAG not in os.environ


def engine_class(name: str) -> "EngineClass":
    """Return the class of an engine, given its name or import path; raise ConfigError if there is none."""
    found: EngineClass = named_class("engine", name, ENGINES, ("refusal", "connect", "start"))
    return found


def engine_for(cfg: "TrainConfig") -> tuple[str, str]:
    """Return the name of the engine to use, and the reason if it is not the default.

    Raises:
        ConfigError: there is no such engine, or it cannot train with these settings.
    """
    in_job = JOB_FLAG in os.environ
    if is_launched():
        if cfg.engine not in ("auto", "torchrun"):
            raise ConfigError(f"cfg.engine={cfg.engine}, but torchrun has started this process; use cfg.engine=auto")
        if reason := engine_class("torchrun").refusal(cfg, in_job=in_job):
            raise ConfigError(f"torchrun cannot train this: {reason}")
        return "torchrun", ""
    if cfg.start_workers == 0:
        if cfg.engine != "auto":
            raise ConfigError(
                f"cfg.engine={cfg.engine} needs workers, but cfg.start_workers=0 starts none; "
                "use cfg.engine=auto or cfg.start_workers=1"
            )
        return "in_process", ""
    if cfg.engine != "auto":
        reason = engine_class(cfg.engine).refusal(cfg, in_job=in_job)
        if reason:
            raise ConfigError(f"cfg.engine={cfg.engine} cannot train this: {reason}; use cfg.engine=auto")
        return cfg.engine, f"cfg.engine={cfg.engine}"
    if in_job:
        return "ray", ""
    reason = engine_class("local").refusal(cfg, in_job=False)
    return ("ray", reason) if reason else ("local", "")


def changing_size(cfg: "TrainConfig") -> str | None:
    """Return the reason why the number of workers may change during a run, or None if it is fixed."""
    limits = {"min_workers": cfg.elastic.min_workers, "max_workers": cfg.elastic.max_workers}
    changing = [
        f"cfg.elastic.{name}={limit}" for name, limit in limits.items() if limit not in (None, cfg.start_workers)
    ]
    return f"{changing[0]} lets the number of workers change" if changing else None


def shortage(cfg: "TrainConfig", cpus: float, gpus: float, *, cluster: bool) -> str | None:
    """Return what the smallest group of workers lacks, and the cure, or None if it fits.

    Workers reserve the CPUs of a cluster. On one machine, they may outnumber its cores, within `WORKERS_PER_CORE`.
    """
    name = "cfg.elastic.min_workers" if cfg.elastic.min_workers else "cfg.start_workers"
    value = cfg.elastic.min_workers or cfg.start_workers
    workers = max(1, value)
    cores, devices = workers * cfg.cpus_per_worker, workers * cfg.gpus_per_worker * bool(cfg.use_gpu)
    where = "the cluster" if cluster else "this machine"
    if cfg.cpus_per_worker > cpus:
        return f"cfg.cpus_per_worker={cfg.cpus_per_worker}, but {where} has {cpus:g} CPUs; lower it"
    if not cluster and workers > (most := int(cpus * WORKERS_PER_CORE)):
        return f"{name}={value}, but {where} has room for {most} workers; lower it"
    if cluster and cores > cpus:
        return f"{name}={value} needs {cores} CPUs; {where} has room for {cpus:g}; lower {name} or cfg.cpus_per_worker"
    if devices > gpus:
        lower = f"lower {name}, or " if value else ""
        return f"{name}={value} needs {devices:g} GPUs; {where} has room for {gpus:g}; {lower}leave cfg.use_gpu at null"
    return None


def uses_gpus(cfg: "TrainConfig", gpus: float) -> bool:
    """Return True if each worker gets GPUs: if `cfg.use_gpu` says so or, by default, if there are enough."""
    workers = max(1, cfg.elastic.min_workers or cfg.start_workers)
    return gpus >= workers * cfg.gpus_per_worker if cfg.use_gpu is None else cfg.use_gpu


def check_room(cfg: "TrainConfig", cpus: float, gpus: float, *, cluster: bool) -> None:
    """Raise a ConfigError if the smallest group of workers does not fit."""
    if lacking := shortage(cfg, cpus, gpus, cluster=cluster):
        raise ConfigError(lacking)


def usable_cores() -> int:
    """Return the number of cores that this process may use. Some containers and jobs have fewer than their machine.

    Only for numbers that users have not given: what they ask for may outnumber these cores.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine(cfg: "TrainConfig", why: str = "") -> Cluster:
    """Return a cluster that consists of this machine; raise ConfigError if the workers do not fit."""
    cores = os.cpu_count() or 1
    import torch

    gpus = torch.cuda.device_count()
    check_room(cfg, cores, gpus, cluster=False)
    title, own = f"on {cores} cores", cfg.gpus_per_worker
    return Cluster(title, cores, gpus, why=why, use_gpu=uses_gpus(cfg, gpus), gpus_per_worker=own)
