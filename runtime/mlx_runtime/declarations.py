"""`train: TrainDataset = TrainDataset()` declares a dataset; it must not load one.

While `src` is being imported, making a torch Dataset gives a `Declaration` instead: the class and its arguments, no
data. This is done in `Dataset.__new__`, because Python does not call `__init__` when `__new__` returns something else.
So any Dataset written as usual profits, those of libraries too.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch.utils.data import Dataset

_forced: ContextVar[bool] = ContextVar("declaring", default=False)


class Declaration:
    """A dataset that was asked for while `src` was imported.

    Attributes:
        target: its class.
        args, kwargs: as given.
    """

    def __init__(self, target: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs

    def make(self) -> Any:
        """The dataset itself."""
        return self.target(*self.args, **self.kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.target.__name__}() is only declared while src is imported, so it has no {name!r} yet; "
            "use it inside a function or in worker_loop"
        )

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.target.__name__}({', '.join(given)})"


@contextlib.contextmanager
def declaring() -> Iterator[None]:
    """Make Declarations of datasets while the block runs."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def made_when_read(group: Any, around: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """A group of Declarations as a group of datasets, each made when it is first asked for, inside `around()`.

    The object keeps its attributes and gets a subclass of its class as its type, so `isinstance` holds.
    """

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if isinstance(value, Declaration):
            with around():
                value = value.make()
            object.__setattr__(self, name, value)
        return value

    cls = type(group)
    group.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})
    return group


def _importing_src() -> bool:
    """Whether a module of `src` is half imported, by the flag that Python keeps for that."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name == "src" or name.startswith("src.")
    )


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    if _forced.get() or _importing_src():
        return Declaration(cls, args, kwargs)
    return object.__new__(cls)


Dataset.__new__ = _new  # type: ignore[method-assign]
