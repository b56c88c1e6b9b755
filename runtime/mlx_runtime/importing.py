"""Imports of projects, without repeated garbage collection, or on first use, and hooks that run after an import."""

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Turn garbage collection off within the block.

    Imported objects stay, and scanning them repeatedly makes importing torch, Ray and TorchMetrics a third slower.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def add_to_path(folder: Path) -> None:
    """Let this process import the modules of a folder, before those of the same name elsewhere."""
    sys.path[:] = [str(folder), *(item for item in sys.path if item != str(folder))]


def exit_quickly() -> None:
    """Skip the final garbage collection when this process exits, which takes a second or two."""
    atexit.register(gc.freeze)


def imports_on_use(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that imports some of its names, each from another module, on first use."""

    def getattr_of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return getattr_of_module


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call a function once a module has been imported: now, or when other code imports it."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Hook(name, call))


class _Hook:
    """Finder of one module, which calls a function once the module has been executed."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec  # here, so that commands start quickly

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
