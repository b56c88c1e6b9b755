"""Modules of a run's stored code, imported into a private package.

All experiments call their package `src`. In the private package, `src` refers to one snapshot, so that one process can
open models of several experiments.
"""

import builtins
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.config.constructors.declarations import SourceLoader

PREFIX = "_mlx_code_"


def private(tree: Any, project: Path) -> Any:
    """Return a config whose `_target_`s in `src` name the modules of a project, even if `src` is another one here."""
    prefix = PREFIX + hashlib.sha256(str(project.resolve()).encode()).hexdigest()[:16]
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if prefix not in sys.modules:
        package = types.ModuleType(prefix)
        package.__path__ = [str(project)]
        sys.modules[prefix] = package
    return _rename_targets(tree, prefix)


def public(text: str) -> str:
    """Return a message with the original names of modules in place of private ones."""
    return re.sub(rf"{PREFIX}\w+\.", "", text)


def _rename_targets(node: Any, prefix: str) -> Any:
    if isinstance(node, list):
        return [_rename_targets(item, prefix) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: _rename_targets(item, prefix) for name, item in node.items()}
    target = made.get("_target_")
    if isinstance(target, str) and target.startswith("src."):
        made["_target_"] = f"{prefix}.{target}"
    return made


class _Finder:
    """Finds modules of private packages, and lets them import each other by their original names."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        prefix = module.__name__.partition(".")[0]
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": functools.partial(_import, prefix)}
        super().exec_module(module)


def _import(
    prefix: str, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> Any:
    """`__import__` of the modules in a private package."""
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(f"{prefix}.{top}") if top and not level else None
    if spec is None or (spec.origin is None and top != "src"):  # other folders without __init__.py may not be packages
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    found = builtins.__import__(f"{prefix}.{name}", globals, locals, fromlist or (), 0)
    return found if fromlist else sys.modules[f"{prefix}.{top}"]
