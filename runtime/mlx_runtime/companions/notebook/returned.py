"""Return values of training functions on a cluster, as bytes that others may have written.

They are read with `weights_only=True`. Objects of models are created as by pickle, but only of classes that are
imported here, and without calls of their constructors, which could load files.
"""

import io
import sys
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.runs.checkpoints.groups import copy_to_cpu, plain_entries

ACTIVATIONS = ("torch.nn.functional", "torch._C._nn")
"""Modules of functions that models may have as attributes."""

KINDS = "numbers, text, tensors, models, or lists and dicts of these, such as a state_dict"


class UnknownClassError(MlxError):
    """A value has an object of a class that must not be read, or is not imported."""


def write_value(value: Any) -> bytes:
    """Return a value as bytes, on the CPU.

    Raises:
        MlxError: it cannot be written, or `read_value` would refuse it.
    """
    kept, refused = plain_entries({"value": value})
    file = io.BytesIO()
    try:
        torch.save(value if refused else copy_to_cpu(kept["value"]), file)
        read_value(file.getvalue())
    except Exception as error:  # torch and the user's classes raise many types
        if isinstance(error, MlxError):
            raise
        raise MlxError(f"{short_message(error)}; return {KINDS}") from error
    return file.getvalue()


def read_value(content: bytes) -> Any:
    """Return a value from its bytes.

    Raises:
        UnknownClassError: it has an object of another class.
    """
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))
    found = {name: _object_at(name) for name in names}
    for name in [name for name in names if found[name] is None]:
        module = name.rpartition(".")[0]
        if module in sys.modules:
            raise UnknownClassError(f"it contains {name}; return {KINDS}")
        raise UnknownClassError(f"it contains {name}; import {module} first, or return {KINDS}")
    creators = [(_Creator(item) if _is_model(item) else item, name) for name, item in found.items()]
    classes = [(item, str(number)) for number, item in enumerate(found.values())]  # names that no value can contain
    with torch.serialization.safe_globals([*creators, *classes]):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class _Creator:
    """A class in the eyes of torch's unpickler, which cannot be called."""

    def __init__(self, cls: Any) -> None:
        vars(self)["__new__"] = lambda _, *args: cls.__new__(cls, *args)

    def __call__(self, *_: Any) -> None:
        raise UnknownClassError(f"it calls a constructor; return {KINDS}")


def _object_at(path: str) -> Any:
    """Return the class or activation with an import path if a value may contain it, otherwise None."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type):
        return found if module in ACTIVATIONS and getattr(found, "__module__", None) in ACTIVATIONS else None
    if module.startswith("torch.") and not module.startswith("torch.nn."):
        return None
    return found if _is_model(found) or issubclass(found, Enum) else None


def _is_model(found: Any) -> bool:
    """Return True for classes of models, and of their settings."""
    return isinstance(found, type) and (issubclass(found, nn.Module) or is_dataclass(found))
