"""Suggestions for keys and paths that do not exist."""

import difflib
import sys
from typing import Any

from mlx_runtime.extras import cure

MOVED = {
    **{name: f"cross_validation.{name}" for name in ("fold", "folds", "splitter")},
    **{name: f"debug.{name}" for name in ("limit_batches", "limit_eval_batches", "limit_train_batches")},
    **{name: f"debug.{name}" for name in ("overfit_batches", "profile", "stop_on_nan", "watch_gradients")},
    **{name: f"elastic.{name}" for name in ("keep_global_batch", "max_failures", "max_workers", "min_workers")},
    "hang_timeout_s": "elastic.hang_timeout_s",
    "mirror": "hub.mirror",
    "mirror_timeout_s": "hub.timeout_s",
    "prepared": "preparation.mode",
    **{f"prepared_{name}": f"preparation.{name}" for name in ("max_days", "max_gb", "path")},
    **{name: f"sharding.{name}" for name in ("offload", "shard_size")},
}
"""Settings that moved to a section of `cfg`, by their former key below it."""


def describe_move(key: str) -> str | None:
    """Return a sentence with the new key of a moved setting; None for all other keys."""
    _, _, name = key.partition("cfg.")
    return f"{key} is cfg.{MOVED[name]} now" if name in MOVED else None


def import_problem(path: str, error: Exception) -> str:
    """Return why a path cannot be imported, with the cure."""
    why = "; ".join(filter(None, [str(error).splitlines()[-1], cure(error)]))
    near = namesake(path)
    return f"cannot be imported: {why}" + (f". Did you mean {near!r}?" if near else "")


def namesake(path: str) -> str | None:
    """Return the path of the only class or function of this name in loaded modules of its package, or a similar one."""
    package, _, _ = path.partition(".")
    home, _, name = path.rpartition(".")
    modules = [module for title, module in list(sys.modules.items()) if title.partition(".")[0] == package]
    found = {f"{module.__name__}.{name}" for module in modules if _defines(module, name)}
    if not found and home in sys.modules:  # a typo
        public = [item for item in vars(sys.modules[home]) if not item.startswith("_")]
        found = {f"{home}.{item}" for item in difflib.get_close_matches(name, public, n=1)}
    return found.pop() if len(found) == 1 else None


def _defines(module: Any, name: str) -> bool:
    thing = vars(module).get(name)
    return callable(thing) and getattr(thing, "__module__", None) == module.__name__
