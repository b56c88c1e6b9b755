"""The calls that made a default, from its source.

A default such as `fc: nn.Linear = nn.Linear(32, 10)` is an object, and objects do not remember their constructor call.
So the default's *expression* is read from the source and evaluated again, with every call in it recorded. This yields
the constructor and its arguments, regardless of the attributes of the object (decision 0003).
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_runtime.config.constructors.declarations import CallRewriter, declare_call

_CALL, _NAME = "__mlx_call__", "__mlx_name__"
"""Names of the methods of a `Recording` in an instrumented expression."""


@dataclass(frozen=True)
class Call:
    """A recorded call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    """Kept alive, so that no other object gets its id."""
    before: "Call | None" = None
    """The earlier call with the same result: `Linear(2, 2)` in `weight_norm(Linear(2, 2))`."""


@dataclass
class Recording:
    """The evaluation of one expression: calls by the id of their result, and names by the id of their value."""

    calls: dict[int, Call] = field(default_factory=dict)
    names: dict[int, tuple[str, Any]] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
        """Return a function that takes the arguments, and returns a function that makes and records the call."""
        return lambda *args, **kwargs: lambda: self._record(function, args, kwargs)

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = declare_call(function, *args, **kwargs)
        if getattr(function, "__name__", "") != "<lambda>" or id(result) not in self.calls:
            self.calls[id(result)] = Call(function, args, kwargs, result, self.calls.get(id(result)))
        return result

    def name(self, path: str, value: Any, root: Any) -> Any:
        start = root.__name__ if isinstance(root, types.ModuleType) else f"{root.__module__}.{root.__qualname__}"
        self.names[id(value)] = (f"{start}.{path}", value)
        return value

    def name_of(self, value: Any) -> str | None:
        """Return the dotted name by which the expression referred to an object, like `torch.relu`."""
        return self.names[id(value)][0] if id(value) in self.names else None

    @contextlib.contextmanager
    def before(self, call: Call) -> Iterator[None]:
        """For an argument that a call also returned, show the call that made it."""
        calls = dict(self.calls)
        self.calls.pop(id(call.result), None)
        if call.before is not None:
            self.calls[id(call.result)] = call.before
        try:
            yield
        finally:
            self.calls = calls


def record_default(target: Callable[..., Any], name: str) -> tuple[Any, Recording] | None:
    """Evaluate the default expression of a parameter again; None if its source is not available."""
    if isinstance(target, type) and (dataclasses.is_dataclass(target) or name in inspect.get_annotations(target)):
        source = _field(target, name)
    else:
        source = _argument(target.__init__ if isinstance(target, type) else target, name)  # type: ignore[misc]
    return _record(*source, name) if source else None


def record_constant(value: Any, home: str) -> tuple[Any, Recording] | None:
    """Evaluate a module-level constant that serves as a default again: `BLOCK = Block(3)`, `block: Block = BLOCK`.

    Searches the module `home` first, then all modules of its package, since constants get imported.
    """
    if value is None or type(value) in (bool, int, float, str):
        return None
    top = home.partition(".")[0]
    package = [name for name in list(sys.modules) if name == top or name.startswith(f"{top}.")]
    for module in filter(None, map(sys.modules.get, [home, *package])):
        for constant in [name for name, held in list(vars(module).items()) if held is value]:
            body = _statements.__wrapped__(module)  # not cached, because a module may be loaded again
            if (expression := _assigned_expression(body, constant)) is not None:
                return _record(expression, vars(module), constant)
    return None


def _record(expression: ast.expr, namespace: Mapping[str, Any], name: str) -> tuple[Any, Recording]:
    """Evaluate an expression with every call recorded. Datasets are declared, not loaded."""
    recording = Recording()
    body = _Instrument(namespace).visit(copy.deepcopy(expression))
    code = compile(ast.fix_missing_locations(ast.Expression(body)), f"<default of {name}>", "eval")
    hooks = {_CALL: recording.call, _NAME: recording.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # issued when the default itself was constructed
        return eval(code, {**namespace, **hooks}), recording


class _Instrument(CallRewriter):
    """Records calls, and rewrites `a.b.c` as `name("b.c", a.b.c, a)` for a module or class `a`."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        super().__init__(_CALL, bodies=True)
        self._namespace = namespace

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802 - a method of ast.NodeVisitor
        root, names = node.value, [node.attr]
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        if isinstance(root, ast.Name) and isinstance(self._namespace.get(root.id), types.ModuleType | type):
            return ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(".".join(names)), node, root], [])
        return self.generic_visit(node)


def _argument(function: Callable[..., Any], name: str) -> tuple[ast.expr, dict[str, Any]] | None:
    """Return the default expression of a parameter, and the names that it may use."""
    function = inspect.unwrap(function)
    definition = next(iter(_statements(function)), None)
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = definition.args
    names = [item.arg for item in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    values = [*arguments.defaults, *arguments.kw_defaults]  # the first parameters may have no default
    expression = dict(zip(names[-len(values) :], values, strict=True)).get(name) if values else None
    if expression is None:
        return None
    return expression, {**function.__globals__, **inspect.getclosurevars(function).nonlocals}


def _field(cls: type, name: str) -> tuple[ast.expr, dict[str, Any]] | None:
    """Return the default expression of a field of a dataclass, and the names that it may use."""
    owner = next((base for base in cls.__mro__ if name in inspect.get_annotations(base)), cls)
    definition = next(iter(_statements(owner)), None)
    expression = _assigned_expression(definition.body, name) if isinstance(definition, ast.ClassDef) else None
    if expression is None:
        return None
    if isinstance(expression, ast.Call):
        options = {option.arg: option.value for option in expression.keywords}
        if "default_factory" in options:
            expression = ast.Call(options["default_factory"], [], [])
        elif "default" in options and ast.unparse(expression.func).endswith("field"):
            expression = options["default"]
    return expression, {**vars(importlib.import_module(owner.__module__)), **vars(owner)}


def _assigned_expression(body: list[ast.stmt], name: str) -> ast.expr | None:
    """Return the expression that a module or class assigns to a name; None if it assigns it never or repeatedly."""
    values = []
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            values.append(getattr(statement, "value", None))
    return values[0] if len(values) == 1 else None


@functools.lru_cache(maxsize=64)
def _statements(thing: Any) -> list[ast.stmt]:
    """Parse the source of a module, class or function; empty if it is not available.

    Cached, because `inspect` parses the whole module to find the source of a class.
    """
    try:
        source = inspect.getsource(thing)
        return ast.parse(source if isinstance(thing, types.ModuleType) else textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError):
        return []
