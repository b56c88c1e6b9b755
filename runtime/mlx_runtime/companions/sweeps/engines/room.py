"""The number of runs of a sweep that train at the same time."""

from mlx_runtime.errors import UsageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.workers.placement import uses_gpus


def room(
    cfg: TrainConfig,
    cpus: float,
    gpus: float,
    parallel: int | None = None,
    gpus_per_trial: float | None = None,
    *,
    cluster: bool,
) -> tuple[int, float]:
    """Return how many runs train at the same time, by default as many as fit, and the GPUs that each of them has.

    On one machine, a run with GPUs reserves no cores, and at least one run fits.

    Args:
        cfg: settings that all runs have in common.
        cpus: of the machine or the cluster.
        gpus: of the machine or the cluster.
        parallel: runs at the same time that the user asks for.
        gpus_per_trial: GPUs, or the share of one, that the user asks for.
        cluster: True if workers reserve CPUs, and have at most `cfg.gpus_per_worker` GPUs each.

    Raises:
        UsageError: fewer fit than asked for, or workers and GPUs do not match.
    """
    workers = max(1, cfg.start_workers)
    all_gpus = workers * cfg.gpus_per_worker
    own = gpus_per_trial if gpus_per_trial is not None else float(all_gpus) if uses_gpus(cfg, gpus) else 0.0
    if gpus_per_trial is not None and cfg.use_gpu is not None and cfg.use_gpu != bool(own):
        raise UsageError(f"--gpus-per-trial {own:g} contradicts cfg.use_gpu={str(cfg.use_gpu).lower()}")
    if own < 0 or (workers > 1 and 0 < own < workers) or (own > 1 and own % 1) or (cluster and own > all_gpus):
        has = "one GPU" if cfg.gpus_per_worker == 1 else f"{cfg.gpus_per_worker} GPUs"
        text = f"--gpus-per-trial is {own:g} for {workers} workers; each has {has}, a single worker also a share"
        raise UsageError(text)
    fits, needs = [], []
    if cluster or not own:
        each = workers * cfg.cpus_per_worker
        fits.append(int(cpus // each) if cluster else max(1, int(cpus // each)))
        needs.append(f"{each} of {cpus:g} {'CPUs' if cluster else 'cores'}")
    if own:
        fits.append(int(gpus // own) if own >= 1 else int(gpus) * int(1 / own))
        needs.append(f"{own:g} of {gpus:g} GPUs")
    if min(fits) < (asked := parallel or 1):
        trials = f"{asked} trial{'s' * (asked > 1)}"
        need = " and ".join(needs)
        raise UsageError(f"cannot run {trials} at a time: each needs {need}, so at most {min(fits)} fit")
    return parallel or min(fits), own
