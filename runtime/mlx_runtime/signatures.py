"""What a constructor says about itself: its parameters, their types and the calls that made their defaults.

A default such as `fc: nn.Linear = nn.Linear(32, 10)` is an object, and objects do not remember how they were
made. So the default *expression* is read from the source and evaluated once more with every call in it
recorded: that gives the constructor and the arguments, whatever the class stores (see decision 0003).
"""

import ast
import contextlib
import copy
import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.declarations import declaring
from mlx_runtime.errors import BindError

MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One argument of a constructor.

    Attributes:
        name: as in the signature.
        hint: resolved type, `Any` when it cannot be resolved, `MISSING` when there is no annotation.
        default: the value in the signature, or `MISSING`.
        kind: positional only, keyword, `*args` or `**kwargs`, as in `inspect.Parameter`.
    """

    name: str
    hint: Any
    default: Any
    kind: Any


@dataclass(frozen=True)
class Call:
    """A call seen while a default expression was evaluated; `result` is kept so that its id stays its own.

    Attributes:
        before: the earlier call with the same result: `Linear(2, 2)` in `weight_norm(Linear(2, 2))`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    before: "Call | None" = None


@dataclass
class Calls:
    """What was seen while one expression was evaluated: calls by their result, dotted names by their value."""

    made: dict[int, Call] = field(default_factory=dict)
    named: dict[int, tuple[str, Any]] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") != "<lambda>" or id(result) not in self.made:
            self.made[id(result)] = Call(function, args, kwargs, result, self.made.get(id(result)))
        return result

    def name(self, path: str, value: Any, root: Any) -> Any:
        start = root.__name__ if isinstance(root, types.ModuleType) else f"{root.__module__}.{root.__qualname__}"
        self.named[id(value)] = (f"{start}.{path}", value)
        return value

    def of(self, result: Any) -> Call | None:
        """The call that gave an object."""
        return self.made.get(id(result))

    @contextlib.contextmanager
    def inside(self, call: Call) -> Iterator[None]:
        """What a call was given, while the block runs: an argument that it returned is what it was before."""
        made = dict(self.made)
        self.made.pop(id(call.result), None)
        if call.before is not None:
            self.made[id(call.result)] = call.before
        try:
            yield
        finally:
            self.made = made

    def path_of(self, value: Any) -> str | None:
        """The dotted name that an object was called by, like `torch.relu`."""
        return self.named[id(value)][0] if id(value) in self.named else None


def is_factory(default: Any) -> bool:
    """Whether a dataclass field shows a stand-in because its default is made by a factory."""
    return type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"


def path_of(thing: Any) -> str:
    """The dotted path that imports a class or function again.

    Raises:
        BindError: it has none (a lambda, something defined inside a function or in `__main__`).
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    path = f"{module}.{name}" if module else str(name)
    if not name or "<" in name or module == "__main__":
        raise BindError(f"{thing!r} cannot be imported by name; define it with a name at the top of a module")
    try:
        found = object_at(path)
    except (ImportError, AttributeError):
        found = None
    if found != thing:
        raise BindError(f"{path} does not lead back to {thing!r}; define it with a name at the top of a module")
    return path


def object_at(path: str) -> Any:
    """The class, function or constant at a dotted path.

    Raises:
        ImportError: a module of the path cannot be imported.
        AttributeError: the module has no such name.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name + ".").startswith(error.name + "."):
                continue  # not a module: perhaps a class that holds the next name
            raise
        return functools.reduce(getattr, parts[split:], module)
    raise ImportError(f"no module named {parts[0]!r}")


def loaded_at(path: str) -> Any:
    """What `object_at` gives if finding it runs no code, because its module was imported before; else `MISSING`.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    parts = path.split(".")
    split = next((count for count in range(len(parts) - 1, 0, -1) if ".".join(parts[:count]) in sys.modules), 0)
    if not split:
        if len(parts) > 1 and importlib.util.find_spec(parts[0]) is not None:
            return MISSING
        raise ImportError(f"no module named {parts[0]!r}")
    module = sys.modules[".".join(parts[:split])]
    if parts[split] in vars(module):
        return functools.reduce(getattr, parts[split + 1 :], vars(module)[parts[split]])
    below = getattr(module, "__path__", None) if len(parts) > split + 1 else None
    if "__getattr__" in vars(module) or (below and PathFinder.find_spec(f"{module.__name__}.{parts[split]}", below)):
        return MISSING
    raise AttributeError(f"module {module.__name__!r} has no attribute {parts[split]!r}")


def parameters(target: Callable[..., Any]) -> list[Parameter] | None:
    """The parameters of a class or function, in order, or None when it does not tell (some C types)."""
    signature = signature_of(target)
    if signature is None:
        return None
    hints = _hints(target)
    return [
        Parameter(item.name, MISSING if item.annotation is MISSING else hints(item), item.default, item.kind)
        for item in signature.parameters.values()
    ]


def signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a class or function, without what `inspect.signature` gets wrong; None when it has none."""
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return None
    items = list(signature.parameters.values())
    if isinstance(target, type) and items and items[0].name == "self":
        del items[0]  # classes of pyo3, like those of tokenizers, list it
    if dataclasses.is_dataclass(target) and hasattr(target.__init__, "__wrapped__"):
        around = inspect.signature(target.__init__, follow_wrapped=False).parameters.values()
        items += [item for item in around if item.kind is inspect.Parameter.VAR_KEYWORD]  # configs of transformers
    return signature.replace(parameters=items)


def groups(experiment: type) -> dict[str, type]:
    """The groups of an experiment: the arguments of its `__init__`, or its annotated attributes when it has none.

    Raises:
        BindError: an argument has no type, or one that cannot be imported.
    """
    config = getattr(experiment, "CONFIG", "TrainConfig")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = [item for item in parameters(experiment) or [] if item.kind in named]
    if own:
        hints = {item.name: item.hint for item in own}
        where = f"{experiment.__name__}.__init__"
    else:
        bases = [base for base in reversed(experiment.__mro__) if base.__module__.partition(".")[0] not in _FOREIGN]
        names = [name for base in bases for name in inspect.get_annotations(base)]
        hints = {name: hint for name, hint in typing.get_type_hints(experiment).items() if name in names}
        where = experiment.__name__
    for name, hint in hints.items():
        if hint is MISSING or not isinstance(hint, type):
            title = name.capitalize() if name != "cfg" else config
            raise BindError(f"{where}: {name!r} has no type; write {name}: {title}")
    if "cfg" not in hints:
        raise BindError(f"{where} has no cfg; write cfg: {config}, and name the other groups alike")
    return hints


def recorded_default(target: Callable[..., Any], name: str) -> tuple[Any, Calls] | None:
    """Evaluate a default expression again, recording its calls.

    Returns:
        The fresh value and the calls by `id` of their result, or None when the source is not to be had.
    """
    found = _default_expression(target, name)
    if found is None:
        return None
    return _recorded(*found, name)


def recorded_constant(value: Any, home: str) -> tuple[Any, Calls] | None:
    """The same for a default that is a constant at the top of a module: `BLOCK = Block(3)`, `block: Block = BLOCK`.

    Looks in the module `home` and in those of the same package, since constants are imported.
    """
    family = [name for name in list(sys.modules) if name.partition(".")[0] == home.partition(".")[0]]
    for name in [home, *family]:
        module = sys.modules.get(name)
        for constant, held in list(vars(module).items()) if module else []:
            if held is value and type(value) not in (bool, int, float, str, type(None)):
                expression = _assigned(module, constant)
                if expression is not None:
                    return _recorded(expression, vars(module), constant)
    return None


def _recorded(expression: ast.expr, namespace: Mapping[str, Any], name: str) -> tuple[Any, Calls]:
    """Evaluate an expression with every call in it recorded; datasets are declared, not loaded."""
    calls = Calls()
    tree = ast.fix_missing_locations(ast.Expression(_Recorded(namespace).visit(copy.deepcopy(expression))))
    code = compile(tree, f"<default of {name}>", "eval")
    with declaring(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the default itself was made
        return eval(code, {**namespace, _CALLS: calls}), calls  # the user's own expression, in its own module


def convert(value: Any, hint: Any) -> Any:
    """A YAML value as the annotated type wants it: a list for `tuple` becomes a tuple, a string for `Path` a Path.

    Raises:
        TypeError: the value does not fit the type.
    """
    if hint in (Any, MISSING, object) or isinstance(hint, typing.TypeVar):
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return convert(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _first_fit(value, arguments)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
        raise TypeError
    kind = origin or hint
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(convert(item, want) for item, want in _pair_up(value, arguments))
    if kind in (list, Sequence) and isinstance(value, list):
        return [convert(item, arguments[0] if arguments else Any) for item in value]
    if kind is dict and isinstance(value, dict):
        key, item = arguments or (Any, Any)
        return {convert(k, key): convert(v, item) for k, v in value.items()}
    if kind is float and type(value) is int:
        return value  # as in Python, an int will do; a default of 0 for a float stays the int it was
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if isinstance(kind, type) and issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    if isinstance(kind, type):
        fits = type(value) is not bool if kind is int else True  # Python's bool is an int; a config's is not
        if fits and isinstance(value, kind):
            return value
        raise TypeError
    return value if _accepts(kind, value) else _refuse()


def name_of(hint: Any) -> str:
    """A type as a person would write it."""
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _first_fit(value: Any, hints: Sequence[Any]) -> Any:
    exact = [hint for hint in hints if (typing.get_origin(hint) or hint) is type(value)]
    for hint in [*exact, *hints]:
        try:
            return convert(value, hint)
        except TypeError:
            continue
    raise TypeError


def _pair_up(values: Sequence[Any], hints: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    if not hints:
        hints = (Any, ...)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(values)
    if len(hints) != len(values):
        raise TypeError
    return zip(values, hints, strict=True)


def _accepts(kind: Any, value: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a special form that has no instances, like Callable[..., int] or NewType
        return True


def _refuse() -> Any:
    raise TypeError


def _hints(target: Callable[..., Any]) -> Callable[[inspect.Parameter], Any]:
    """Resolve annotations one by one, because one name that only exists for type checkers must not hide the rest."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    function = inspect.unwrap(function)
    try:
        resolved = typing.get_type_hints(function)
    except Exception:  # annotations are arbitrary expressions of somebody's module
        resolved = {}
    namespace = getattr(function, "__globals__", {})

    def hint(item: inspect.Parameter) -> Any:
        if item.name in resolved:
            return resolved[item.name]
        if not isinstance(item.annotation, str):
            return item.annotation
        try:
            return eval(item.annotation, dict(namespace))
        except Exception:
            return Any

    return hint


_CALLS = "__mlx_calls__"

_FOREIGN = ("mlx_runtime", "builtins")


class _Recorded(ast.NodeTransformer):
    """`f(x)` → `__mlx_calls__.call(f, x)` and `a.b.c` → `__mlx_calls__.name("b.c", a.b.c, a)`, in an expression."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(_recorder("call"), [node.func, *node.args], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root, names = node.value, [node.attr]
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        if not isinstance(root, ast.Name) or not self._names_code(root.id):
            self.generic_visit(node)
            return node
        return ast.Call(_recorder("name"), [ast.Constant(".".join(names)), node, root], [])

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.namespace = namespace

    def _names_code(self, name: str) -> bool:
        return isinstance(self.namespace.get(name), types.ModuleType | type)


def _recorder(method: str) -> ast.expr:
    return ast.Attribute(ast.Name(_CALLS, ast.Load()), method, ast.Load())


def _default_expression(target: Callable[..., Any], name: str) -> tuple[ast.expr, dict[str, Any]] | None:
    """The source of a default and the names it may use."""
    if not isinstance(target, type):
        return _argument_default(target, name)
    if dataclasses.is_dataclass(target):
        for base in target.__mro__:
            if name in inspect.get_annotations(base):
                return _field_default(base, name)
        return None
    return _argument_default(target.__init__, name)  # type: ignore[misc]


def _argument_default(function: Callable[..., Any], name: str) -> tuple[ast.expr, dict[str, Any]] | None:
    function = inspect.unwrap(function)
    definition = _parsed(function)
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    offset = len(positional) - len(arguments.defaults)
    defaults = {item.arg: value for item, value in zip(positional[offset:], arguments.defaults, strict=True)}
    defaults |= {
        item.arg: value for item, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value
    }
    if name not in defaults:
        return None
    return defaults[name], {**function.__globals__, **inspect.getclosurevars(function).nonlocals}


def _field_default(cls: type, name: str) -> tuple[ast.expr, dict[str, Any]] | None:
    definition = _parsed(cls)
    if not isinstance(definition, ast.ClassDef):
        return None
    namespace = {**vars(importlib.import_module(cls.__module__)), **vars(cls)}
    for statement in definition.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == name
        ):
            expression = statement.value
            if isinstance(expression, ast.Call):
                options = {option.arg: option.value for option in expression.keywords}
                if "default_factory" in options:
                    return ast.Call(options["default_factory"], [], []), namespace
                if "default" in options and ast.unparse(expression.func).endswith("field"):
                    return options["default"], namespace
            return (expression, namespace) if expression else None
    return None


def _assigned(module: types.ModuleType | None, name: str) -> ast.expr | None:
    """What a module assigns to a name at its top, or None when that is not there or not the only time."""
    try:
        body = ast.parse(inspect.getsource(module)).body if module else []
    except (OSError, TypeError, SyntaxError):
        return None
    found = []
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found.append(getattr(statement, "value", None))
    return found[0] if len(found) == 1 else None


def _parsed(thing: Any) -> ast.stmt | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
