"""Settings of a cross-validation that contradict each other."""

from typing import Any


def contradictions(cfg: Any) -> list[str]:
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
