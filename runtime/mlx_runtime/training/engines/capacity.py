"""Do the workers of a run fit on a machine or a cluster?"""

from typing import NamedTuple

from mlx_runtime.training.options import DataConfig, TrainConfig


class Shortage(NamedTuple):
    """What is missing.

    Attributes:
        text: What the run needs and what there is, without a final period.
        hint: How to make it fit; a sentence without a final period.
    """

    text: str
    hint: str


def shortage(cfg: TrainConfig | DataConfig, cpus: float, gpus: float, *, cluster: bool) -> Shortage | None:
    """Return what the smallest group of workers lacks, or None if it fits.

    Args:
        cfg: Settings of the run.
        cpus, gpus: Number of CPUs and GPUs in total.
        cluster: True if workers reserve CPUs. On one machine, workers may outnumber cores.
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
    """Return True if each worker gets a GPU: as `cfg.use_gpu` says, or by default if there are enough."""
    return gpus >= max(1, cfg.min_workers or cfg.start_workers) if cfg.use_gpu is None else cfg.use_gpu
