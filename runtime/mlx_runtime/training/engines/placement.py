"""Choose where a run trains: in this process, on this machine, or on Ray, embedded or an existing cluster."""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

from mlx_runtime.errors import ConfigError
from mlx_runtime.training.options import DataConfig, EngineName, TrainConfig

JOB_FLAG = "MLX_IN_JOB"
"""Environment variable of a submitted job: its driver joins the cluster that it runs on."""


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


def check_room(cfg: TrainConfig | DataConfig, cpus: float, gpus: float, *, cluster: bool) -> None:
    """Raise a ConfigError if the smallest group of workers does not fit; see `shortage`."""
    lacking = shortage(cfg, cpus, gpus, cluster=cluster)
    if lacking:
        raise ConfigError(f"{lacking.text}. {lacking.hint}")


def this_machine(cfg: TrainConfig | DataConfig, engine: EngineName) -> Cluster:
    """Return this machine as the place of a run; ConfigError if the workers do not fit."""
    cores = os.cpu_count() or 1
    if isinstance(cfg, DataConfig):  # user code chooses its device
        check_room(cfg, cores, math.inf, cluster=False)
        return Cluster("0: in this process", False, "127.0.0.1", 0, 0, engine)
    import torch

    gpus = torch.cuda.device_count()
    check_room(cfg, cores, gpus, cluster=False)
    title, cpus = ("0: training in this process", 0) if engine == "in_process" else (f"on {cores} cores", cores)
    return Cluster(title, False, "127.0.0.1", cpus, gpus, engine, use_gpu=uses_gpus(cfg, gpus))
