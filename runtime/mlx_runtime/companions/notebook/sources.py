"""Functions of cells and interactive sessions, as the source of a module that workers execute.

The module has the definitions that a function uses, directly or not, and the values of the variables that it reads. It
is the same text in another session, so that a resumed run can refuse another function. Variables that hold secrets are
passed in the environment instead, and the text only has their names.
"""

import __future__

import ast
import base64
import inspect
import io
import linecache
import math
import os
import pickle
import pickletools
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from mlx_runtime.companions.notebook.cells import defined_names, first_line
from mlx_runtime.errors import UsageError, short_message
from mlx_runtime.storage.redaction import redact

MODULE = "mlx_cells"
"""Name of the module of a run, on workers and in the session that starts it."""

MOST_BYTES = 1 << 18
"""Maximum size of a variable, because it is recorded in conf.yaml."""

MOST_SECRET_BYTES = 100_000
"""Maximum size of a variable that holds a secret: Linux limits each environment variable to 128 KiB."""

ENVIRONMENT = "MLX_VALUE_"
"""Beginning of the names of environment variables with variables that hold secrets."""

_secrets: dict[str, str] = {}
"""Variables of the executed module that hold secrets."""


def module_of(function: Callable[..., Any]) -> "FunctionModule":
    """Return a module with a function of this session, and with everything of it that the function uses.

    From now on, this session is that module here, so that objects of its classes can be unpickled.

    Raises:
        UsageError: the function, or a name that it uses, cannot be sent to workers.
    """
    main = sys.modules["__main__"]
    module = FunctionModule(vars(main), function.__name__)
    sys.modules[MODULE] = main
    return module


def execute(source: str, secrets: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Execute the source of a module in this process, in place of an earlier one.

    Args:
        source: the module.
        secrets: its variables that hold secrets, by name.
    """
    _secrets.clear()
    _secrets.update(secrets)
    filename = f"<{MODULE}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    sys.modules[MODULE] = module = types.ModuleType(MODULE)
    exec(compile(source, filename, "exec"), vars(module))


def all_names(source: str) -> set[str]:
    """Return the names that a module defines."""
    return {name for node in ast.parse(source).body for name in defined_names(node)}


def changed_names(before: str, after: str) -> list[str]:
    """Return the names that two modules define differently."""
    one, other = (
        {name: ast.dump(node) for node in ast.parse(text).body for name in defined_names(node)}
        for text in (before, after)
    )
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def secret(name: str) -> str:
    """Return a variable of the executed module that holds a secret: its text, or the expression of another value."""
    return _secrets[name]


def restore(pickled: str, names: Mapping[str, Any]) -> Any:
    """Return a variable from its pickle, in base64; `names` are those of its module."""
    return Unpickler(io.BytesIO(base64.b64decode(pickled)), names).load()


class FunctionModule:
    """The module of a function: imports, and statements in the order in which they are executed.

    Args:
        session: names of this session.
        function: name of the function.

    Attributes:
        secrets: the variables that hold secrets, by name.
    """

    def __init__(self, session: Mapping[str, Any], function: str) -> None:
        self._session, self._function = session, function
        self._statements: dict[str, str] = {}  # by the name that they define
        self._imports: dict[str, None] = {}
        self.secrets: dict[str, str] = {}
        code = inspect.unwrap(session[function]).__code__
        self._strings = bool(code.co_flags & __future__.annotations.compiler_flag)  # annotations are text
        self.add(function)

    def text(self) -> str:
        """Return the source, without comments."""
        future = ["from __future__ import annotations"] if self._strings else []
        imports = "\n".join([*future, *self._imports])
        text = "\n\n\n".join(filter(None, [imports, *self._statements.values()])) + "\n"
        return text.replace("${", "\\x24{")  # in strings; conf.yaml would look the value up

    def references(self) -> dict[str, str]:
        """Set the environment variables for the secrets, and return their references in a config, by name."""
        os.environ.update({f"{ENVIRONMENT}{name}": text for name, text in self.secrets.items()})
        return {name: f"${{oc.env:{ENVIRONMENT}{name}}}" for name in self.secrets}

    def add(self, name: str) -> None:
        """Add the statement that defines a name, and those of the names that it uses."""
        if name in self._statements or name not in self._session:  # perhaps one of `builtins`
            return
        value = self._session[name]
        self._statements[name] = ""  # it may use itself
        if isinstance(value, types.ModuleType):
            if sys.modules.get(value.__name__) is not value:
                raise self._refusal(name, value, "it is not imported from a file")
            self._imports[f"import {value.__name__} as {name}"] = None
        elif _of_session(value):
            self._define(name, value)
        elif (path := _import_path(value)) is not None:
            self._imports[f"from {path[0]} import {path[1]} as {name}"] = None
        else:
            text = _literal(value) or self._pickle(name, value)
            if _holds_secret(name, text):
                text = self._hide(name, value, text)
            self._take(name, f"{name} = {text}")

    def _hide(self, name: str, value: Any, text: str) -> str:
        """Move a variable to the secrets, and return the expression that reads it there."""
        is_text = isinstance(value, str) and value.isprintable()
        self.secrets[name] = value if is_text else text
        if len(self.secrets[name].encode()) > MOST_SECRET_BYTES:
            raise self._refusal(name, value, f"it holds a secret, and {MOST_SECRET_BYTES:,} bytes is the maximum then")
        self._imports[f"from {__name__} import secret as _secret"] = None
        return f"_secret({name!r})" if is_text else f"eval(_secret({name!r}))"

    def _define(self, name: str, value: Any) -> None:
        node = _statement(name, value, self._session)
        if node is None:
            qualname = getattr(value, "__qualname__", name)
            why = "its source is not kept here; use IPython, Jupyter or a file"
            if "<locals>" in qualname:
                why = f"it was defined in {qualname.partition('.')[0]}; define it at the top level of a cell"
            raise self._refusal(name, value, why, cure="")
        text = ast.unparse(node)
        for used in sorted(_global_names(text) - {name}):
            self.add(used)
        for item in ast.walk(node):
            self._import_submodules(item)
        self._take(name, text)

    def _take(self, name: str, text: str) -> None:
        del self._statements[name]  # behind those that it needs
        self._statements[name] = text

    def _import_submodules(self, node: ast.AST) -> None:
        """Import `xml.dom` for the expression `xml.dom.Node`, because `import xml` does not."""
        parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
        module = self._session.get(parts[0]) if parts else None
        if isinstance(module, types.ModuleType) and all(map(str.isidentifier, parts)):
            path = ".".join([module.__name__, *parts[1:]])
            if path in sys.modules and sys.modules[path] is not None:
                self._imports[f"import {path} as _"] = None

    def _pickle(self, name: str, value: Any) -> str:
        pickler = Pickler(file := io.BytesIO(), self)
        try:
            pickler.dump(value)
        except UsageError:
            raise
        except Exception as error:  # pickling can raise anything
            raise self._refusal(name, value, short_message(error)) from None
        if len(file.getvalue()) > MOST_BYTES:
            size = f"{len(file.getvalue()):,} bytes"
            raise self._refusal(name, value, f"it has {size}, and {MOST_BYTES:,} is the maximum")
        self._imports[f"from {__name__} import restore as _restore"] = None
        return f'_restore("{base64.b64encode(file.getvalue()).decode()}", globals())'

    def require(self, value: Any) -> str | None:
        """Return the name of a class or function of this session, and add it; None for other objects."""
        if not isinstance(value, type | types.FunctionType) or value.__module__ not in ("__main__", MODULE):
            return None
        name: str = value.__qualname__
        if self._session.get(name) is not value:
            raise self._refusal(name, value, "another definition has replaced it")
        self.add(name)
        return name

    def _refusal(self, name: str, value: Any, why: str, cure: str = "; create it in the function") -> UsageError:
        what = name if inspect.isroutine(value) else f"{name}, a {type(value).__name__}"
        uses = name if name == self._function else f"{self._function} uses {what}, which"
        return UsageError(f"{uses} cannot be sent to workers: {why}{cure}")


class Pickler(pickle.Pickler):
    """A pickler that refers to classes and functions of this session by name, and repeats its bytes elsewhere."""

    def __init__(self, file: Any, module: FunctionModule | None) -> None:
        super().__init__(file, protocol=4)
        self.module = module

    def persistent_id(self, obj: Any) -> str | None:
        return None if self.module is None else self.module.require(obj)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.device.type != "cpu":
            raise ValueError(f"a tensor is on {obj.device}")
        if type(obj) is torch.Tensor and not obj.requires_grad and obj.dtype != torch.bfloat16:
            return torch.from_numpy, (obj.numpy(),)  # torch pickles the address of its storage
        return NotImplemented


class Unpickler(pickle.Unpickler):
    """An unpickler of what a `Pickler` has written; `names` are those of the module."""

    def __init__(self, file: Any, names: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_load(self, pid: str) -> Any:
        return self._names[pid]


def _holds_secret(name: str, text: str) -> bool:
    """Return True if a secret is recognized in a variable, given the expression of its value."""
    if text.startswith("_restore("):
        pickled = base64.b64decode(text.split('"')[1])
        texts = [name, *(item for _, item, _ in pickletools.genops(pickled) if isinstance(item, str))]
        text = "\n".join(f"{one} = {other!r}" for one, other in pairwise(texts))
        return redact(text) != text
    return redact(f"{name} = {text}") != f"{name} = {text}"


def _of_session(value: Any) -> bool:
    """Return True for a class or function that this session has defined, even if it is wrapped by a decorator."""
    return getattr(value, "__module__", None) == "__main__" and (
        isinstance(value, type) or inspect.isfunction(inspect.unwrap(value))
    )


def _import_path(value: Any) -> tuple[str, str] | None:
    """Return the module and the name from which a class or function can be imported."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(name, str) and name.isidentifier() and vars(sys.modules.get(module or "", types)).get(name) is value:
        return str(module), name
    return None


def _statement(name: str, value: Any, session: Mapping[str, Any]) -> ast.stmt | None:
    """Return the statement of a cell that defines a class or function; None if its text is not kept."""
    members = vars(value).values() if isinstance(value, type) else [inspect.unwrap(value)]
    codes = [item.__code__ for item in members if inspect.isfunction(item)]
    for code in codes:
        for node in _parse("".join(linecache.getlines(code.co_filename))):
            if name in defined_names(node) and first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0):
                return node
    if not isinstance(value, type):
        return None
    cells: Sequence[str] = session.get("In", ())  # of IPython
    found = [node for text in cells for node in _parse(text) if isinstance(node, ast.ClassDef) and node.name == name]
    return found[-1] if found else None


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


def _global_names(text: str) -> set[str]:
    """Return the names that a statement, or code in it, looks up in its module."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() if top else symbol.is_global():
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(text, MODULE, "exec")))


def _literal(value: Any) -> str | None:
    """Return the source of a plain value; None for other values."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if type(value) is dict:
        items = [_literal(item) for pair in value.items() for item in pair]
        pairs = [f"{key}: {item}" for key, item in zip(items[::2], items[1::2], strict=True)]
        return None if None in items else f"{{{', '.join(pairs)}}}"
    if type(value) in (list, tuple, set) and (value or type(value) is not set):
        items = [_literal(item) for item in value]
        known = [item for item in items if item is not None]
        if len(known) < len(items):
            return None
        if type(value) is set:
            return f"{{{', '.join(sorted(known))}}}"
        return f"[{', '.join(known)}]" if type(value) is list else f"({', '.join(known)}{',' * (len(known) == 1)})"
    return None
