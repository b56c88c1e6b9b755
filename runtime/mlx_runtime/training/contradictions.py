"""Settings of sharding and of a cross-validation that contradict others."""

from typing import Any

from mlx_runtime.sections import CrossValidation, Sharding


def contradictions(cfg: Any) -> list[str]:
    """Return one line per setting that contradicts another. A `cfg` of a user's own class need not have all of them."""
    return [*_sharding_problems(cfg), *_fold_problems(getattr(cfg, "cross_validation", CrossValidation()))]


def _fold_problems(cfg: CrossValidation) -> list[str]:
    """Return one line per setting of a cross-validation that contradicts another."""
    problems, key = [], "cfg.cross_validation"
    if (cfg.folds is None) != (cfg.fold is None):
        problems.append(f"{key}.folds is {cfg.folds} and {key}.fold is {cfg.fold}; set both, or neither")
    elif cfg.folds is not None and cfg.fold is not None and cfg.fold >= cfg.folds:
        problems.append(f"{key}.fold is {cfg.fold}; with {key}.folds={cfg.folds}, it is from 0 to {cfg.folds - 1}")
    if isinstance(cfg.splitter, str) or not (cfg.splitter is None or hasattr(cfg.splitter, "split")):  # str.split
        example = f"'{key}.splitter={{_target_: sklearn.model_selection.StratifiedKFold, shuffle: true}}'"
        problems.append(f"{key}.splitter is {cfg.splitter!r}; it takes an object that splits rows, like {example}")
    return problems


def _sharding_problems(cfg: Any) -> list[str]:
    """Return one line per setting that contradicts `cfg.strategy`."""
    strategy, sharding = getattr(cfg, "strategy", "ddp"), getattr(cfg, "sharding", Sharding())
    size, problems = sharding.shard_size, []
    if sharding.offload != "none" and strategy == "ddp":
        cure = "use cfg.strategy=fsdp or hsdp"
        problems.append(f"cfg.sharding.offload=cpu is for sharded models, and cfg.strategy is ddp; {cure}")
    if strategy != "hsdp":
        if size is not None:
            problems.append(f"cfg.sharding.shard_size={size} is for cfg.strategy=hsdp, and cfg.strategy is {strategy}")
        return problems
    if size is None:
        cure = "set the number of workers that share one replica of the models, or use cfg.strategy=fsdp"
        return [*problems, f"cfg.strategy=hsdp needs cfg.sharding.shard_size; {cure}"]
    elastic, sizes = cfg.elastic, {"start_workers": cfg.start_workers}
    sizes |= {"elastic.min_workers": elastic.min_workers, "elastic.max_workers": elastic.max_workers}
    for name, workers in sizes.items():
        if size > 0 and workers is not None and workers % size:
            below = workers - workers % size
            fitting = f"{below} or {below + size}" if below else str(size)
            problems.append(f"cfg.{name}={workers} is not a multiple of cfg.sharding.shard_size={size}; use {fitting}")
    return problems
