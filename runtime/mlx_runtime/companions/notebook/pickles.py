"""Functions and datasets as pickles for workers, and the digests by which a resumed run finds an edited function.

Workers import what a module defines. They do not import the script or session that starts a run: what a function uses
of `__main__` is pickled by value, and put into the `__main__` of each worker, so that datasets, samples and return
values can refer to their classes by name.
"""

import ast
import contextlib
import dis
import functools
import hashlib
import inspect
import io
import linecache
import pickle
import pickletools
import platform
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, BinaryIO

import cloudpickle  # type: ignore[import-untyped]
import torch

from mlx_runtime.errors import ConfigError, UsageError, short_message
from mlx_runtime.storage.redaction import redact

MAIN = "__main__"

VERSION = ".".join(platform.python_version_tuple()[:2])
"""Version of Python, in the first line of each pickle, because another one cannot read the code in it."""

LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

PLAIN = (bool, int, float, str, bytes)


class Captured:
    """What a function uses of `__main__`, directly or not, or what datasets use.

    Args:
        function: the function.

    Attributes:
        names: classes and functions by name.
        digests: digests of their syntax trees, and of the values of variables, by name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.names: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        self.add(function.__qualname__, function)

    def add(self, name: str, value: Any) -> None:
        """Add the definition or the value of a name, and what it uses.

        Raises:
            UsageError: it cannot be sent to workers, or may hold a secret.
        """
        if name in self.digests or isinstance(value, types.ModuleType):
            return
        self.digests[name] = ""  # it may use itself
        if _is_own(value):
            self._define(name, value)
        elif not _is_importable(value):
            self._measure(name, value)

    def add_used(self, definitions: Iterable[Any]) -> None:
        """Add definitions to which a pickle refers by name."""
        for item in definitions:
            name = item.__qualname__.partition(".")[0]
            self.add(name, getattr(sys.modules[MAIN], name, item))

    def write(self, file: BinaryIO) -> None:
        """Write the function with the names, by value.

        Raises:
            UsageError: it cannot be sent to workers.
        """
        files: dict[str, dict[int, str]] = {}  # lines of definitions by number
        for function in (function for value in self.names.values() for function in _functions(value)):
            with contextlib.suppress(OSError, TypeError):
                lines, first = inspect.getsourcelines(function)
                files.setdefault(function.__code__.co_filename, {}).update(enumerate(lines, first))
        try:
            dump((self._function, self.names, files), file, Pickler)
        except Exception as error:  # pickling can raise anything
            name = self._function.__name__
            raise UsageError(f"{name} cannot be sent to workers: {short_message(error)}") from None

    def _define(self, name: str, value: Any) -> None:
        self.names[value.__qualname__] = value
        functions = _functions(value)
        parts = [_tree(item) for item in (value, *functions)]
        if isinstance(value, type):
            parts.append(f"{sorted(vars(value))}")
            parts += [f"{key}={item!r}" for key, item in vars(value).items() if key[:2] != "__" and type(item) in PLAIN]
            for base in value.__bases__:
                if _is_own(base):
                    self.add(base.__qualname__, base)
        self.digests[name] = _digest("\n".join(parts).encode())
        for function in functions:
            for key in sorted(_global_names(function.__code__) & function.__globals__.keys()):
                self.add(key, function.__globals__[key])
            for key, item in _bound_values(function):
                self.add(f"{name}.{key}", item)

    def _measure(self, name: str, value: Any) -> None:
        content, pickler = _attempt(value, ByName)
        if isinstance(content, Exception):  # by value, its bytes differ between two sessions
            content, _ = _attempt(value, Pickler)
            if isinstance(content, Exception):
                text = f"{self._uses(name)}, a {type(value).__name__}, which cannot be sent to workers"
                raise UsageError(f"{text}: {short_message(content)}; create it in the function")
        else:
            self.digests[name] = _digest(content)
        if _holds_secret(name, value, content):
            text = f"{self._uses(name)}, which may hold a secret, and would be stored with the run"
            raise UsageError(f"{text}; read it in the function, like os.environ['NAME']")
        self.add_used(pickler.used)

    def _uses(self, name: str) -> str:
        return f"{self._function.__name__} uses {name}"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes definitions of `__main__` by value."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.used: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if obj.device.type != "cpu":
                raise ValueError(f"a tensor is on {obj.device}")
            if type(obj) is torch.Tensor and not obj.requires_grad and obj.dtype != torch.bfloat16:
                return torch.from_numpy, (obj.numpy(),)  # torch pickles the address of its storage
        if isinstance(obj, types.CodeType):  # cloudpickle leaves out its file
            make, values = self.dispatch_table[types.CodeType](obj)
            return _located, (make, values, obj.co_filename)
        if isinstance(obj, functools._lru_cache_wrapper):  # pickled by name otherwise
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


class ByName(Pickler):
    """Refers to definitions of `__main__` by name, and repeats its bytes in another session.

    Attributes:
        used: these definitions.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            if obj.__module__ == MAIN:
                self.used.append(obj)
            return NotImplemented  # by name, as plain pickle does
        return super().reducer_override(obj)


def dump(value: Any, file: Any, pickler: type[Pickler]) -> list[Any]:
    """Write a value, after the version of Python. Return the definitions to which it refers by name."""
    file.write(f"{VERSION}\n".encode())
    used = pickler(file)
    used.dump(value)
    return used.used


def check_version(file: BinaryIO) -> None:
    """Read the version of Python from the beginning of a file.

    Raises:
        ConfigError: it is another one.
    """
    version = file.readline(20).decode(errors="replace").strip()
    if version != VERSION:
        raise ConfigError(f"the function or dataset was pickled by Python {version}, and this is {VERSION}; use that")


def read(file: BinaryIO) -> Any:
    """Return the value in a file."""
    check_version(file)
    return pickle.load(file)


def read_function(file: BinaryIO) -> Callable[..., Any]:
    """Return the function in a file, and put the definitions that it uses into the `__main__` of this process."""
    function, names, files = read(file)
    vars(sys.modules[MAIN]).update(names)
    for name, found in files.items():
        lines = [found.get(number, "\n") for number in range(1, max(found) + 1)]
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # for tracebacks
    return function  # type: ignore[no-any-return]


def _attempt(value: Any, kind: type[Pickler]) -> tuple[bytes | Exception, Pickler]:
    """Return the pickle of a value, or why there is none."""
    pickler = kind(file := io.BytesIO())
    try:
        pickler.dump(value)
    except Exception as error:  # pickling can raise anything
        return error, pickler
    return file.getvalue(), pickler


def _is_own(value: Any) -> bool:
    """Return True for a class or function that `__main__` has defined, even if it is wrapped by a decorator."""
    return getattr(value, "__module__", None) == MAIN and (
        isinstance(value, type) or inspect.isfunction(inspect.unwrap(value))
    )


def _is_importable(value: Any) -> bool:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return isinstance(name, str) and getattr(sys.modules.get(str(module)), name, None) is value


def _functions(value: Any) -> list[types.FunctionType]:
    """Return a function, or the methods of a class, with those that decorators of `__main__` have wrapped."""
    members = list(vars(value).values()) if isinstance(value, type) else [value]
    for name in ("fget", "__func__", "func"):  # of properties, class methods, cached properties
        members = [getattr(item, name, None) or item for item in members]
    found = []
    for item in members:
        while item is not None:
            found.append(item)
            item = getattr(item, "__wrapped__", None)
    return [item for item in found if inspect.isfunction(item) and item.__globals__.get("__name__") == MAIN]


def _tree(value: Any) -> str:
    """Return the syntax tree of a definition as text: equal texts mean the same code, without comments."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))))
    except (OSError, TypeError, SyntaxError):  # its source is not kept
        code = getattr(inspect.unwrap(value), "__code__", None)
        constants = [item for item in getattr(code, "co_consts", ()) if type(item) in PLAIN]
        return "" if code is None else f"{code.co_code.hex()} {code.co_names} {constants}"


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that code, and code in it, looks up in its module."""
    found = {str(item.argval) for item in dis.get_instructions(code) if item.opname in LOADS}
    return found.union(*(_global_names(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def _bound_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function has from its definition: defaults, and variables of enclosing functions."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            if name != "__class__":  # for `super()`
                yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _holds_secret(name: str, value: Any, pickled: bytes) -> bool:
    """Return True if a secret is recognized in a variable: by its name, or by names in its pickle."""
    texts = [item for _, item, _ in pickletools.genops(pickled) if isinstance(item, str)]
    pairs = [(name, value if type(value) in PLAIN else ""), *pairwise([name, *texts])]
    text = "\n".join(f"{one} = {other!r}" for one, other in pairs)
    return redact(text) != text


def _located(make: Callable[..., types.CodeType], values: tuple[Any, ...], filename: str) -> types.CodeType:
    return make(*values).replace(co_filename=filename)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)
