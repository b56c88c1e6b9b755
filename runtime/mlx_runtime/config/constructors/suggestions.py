"""Suggestions for keys and paths that do not exist, and for values of wrong types."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_runtime.config.constructors.signatures import choices, parameters, type_name
from mlx_runtime.extras import cure

MOVED = {
    **{name: f"cross_validation.{name}" for name in ("fold", "folds", "splitter")},
    **{name: f"debug.{name}" for name in ("limit_batches", "limit_eval_batches", "limit_train_batches")},
    **{name: f"debug.{name}" for name in ("overfit_batches", "profile", "stop_on_nan", "watch_gradients")},
    **{name: f"elastic.{name}" for name in ("keep_global_batch", "max_failures", "max_workers", "min_workers")},
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


def mismatch(value: Any, hint: Any, key: str, owner: str, variants: Iterable[str], *, objects: bool) -> str:
    """Return the line about a value of a wrong type, with variants or choices that may have been meant."""
    given, choice = f"is {value!r}", ""
    if isinstance(value, dict) and objects:
        given = "has no _target_"
    elif isinstance(value, str):
        names = ", ".join(variants)
        if names:
            choice = f", or one of the variants: {names}"
        elif value.isidentifier() and objects:
            choice = f", and there is no src/variants/{key}/{value}.yaml"
        words = [word for word in choices(hint) if isinstance(word, str)]
        for near in difflib.get_close_matches(value, words, n=1, cutoff=0.54):
            choice += f". Did you mean {near}?"
    return f"{key} {given}; {owner} takes {type_name(hint)}{choice}"


def lacks(tree: Mapping[str, Any], key: str, base: type, object_at: Callable[[str], Any]) -> bool:
    """Return True if a key is an argument in the code that its node in the config lacks."""
    *parents, name = key.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    path = node.get("_target_") if isinstance(node, dict) else None
    if not isinstance(path, str) or name in node:
        return False
    try:
        target = object_at(path)
    except (ImportError, AttributeError):
        return False
    known = [*(parameters(target) or []), *((parameters(base) or []) if parents == ["cfg"] else [])]
    return callable(target) and name in {item.name for item in known}


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
