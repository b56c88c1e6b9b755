"""Datasets as defaults: `train: TrainDataset = TrainDataset()` must not load data when `src` is imported.

An import hook, which `import mlx_runtime` installs, rewrites the modules of `src` as they are compiled. A call `f(x)`
that Python executes during the import, such as one in a default, becomes `__declared__(f)(x)`, which returns a
`Declaration` if `f` is a dataset or returns one of Hugging Face, and calls `f` otherwise. The bodies of functions stay
as they are.
"""

import ast
import contextlib
import functools
import sys
import typing
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

_DECLARED = "__declared__"


class Declaration:
    """A dataset that is not constructed yet: its class or class method, and the arguments of the call."""

    def __init__(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs

    def make(self) -> Any:
        """Construct the dataset, after those that are declared among its arguments."""
        return self.target(*_made(self.args), **_made(self.kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.target.__qualname__}() is not constructed while src is imported, so it has no attribute {name!r}; "
            "use it inside a function or in worker_loop"
        )

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.target.__qualname__}({', '.join(arguments)})"


def _made(value: Any) -> Any:
    if isinstance(value, Declaration):
        return value.make()
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    if type(value) is dict:
        return {name: _made(item) for name, item in value.items()}
    return value


def is_dataset(cls: Any) -> bool:
    """Return True if `cls` is a class of datasets: of torch, of Hugging Face, or with `to_hf()`. Imports neither."""
    data = sys.modules.get("torch.utils.data")
    if not isinstance(cls, type):
        return False
    return (data is not None and issubclass(cls, data.Dataset)) or hasattr(cls, "to_hf") or is_hf_dataset(cls)


def is_hf_dataset(cls: Any) -> bool:
    """Return True if `cls` is the `Dataset` or `IterableDataset` of Hugging Face, or derived from one."""
    library = sys.modules.get("datasets")
    kinds = (getattr(library, "Dataset", None), getattr(library, "IterableDataset", None))
    return isinstance(cls, type) and issubclass(cls, tuple(kind for kind in kinds if isinstance(kind, type)))


def returns_hf_dataset(function: Any) -> bool:
    """Return True if a function is annotated to return a dataset of Hugging Face, like `datasets.load_dataset`."""
    if "datasets" not in sys.modules or "return" not in getattr(function, "__annotations__", {}):
        return False
    try:
        hint = typing.get_type_hints(function)["return"]
    except Exception:  # annotations are arbitrary expressions
        return False
    return any(map(is_hf_dataset, typing.get_args(hint) or [hint]))


def declared(callee: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call for `callee`: a Declaration for a dataset or what returns one, else `callee` itself."""
    if is_dataset(callee) or is_dataset(getattr(callee, "__self__", None)) or returns_hf_dataset(callee):
        return functools.partial(Declaration, callee)
    return callee


def made_on_read(cls: type, context: Callable[[str], contextlib.AbstractContextManager[None]]) -> type:
    """Return a subclass of a group that constructs each declared dataset when it is first read, within
    `context(name)`."""

    def read(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)  # type: ignore[call-arg]
        if isinstance(value, Declaration):
            with context(name):
                value = value.make()
            object.__setattr__(self, name, value)
        return value

    return type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__, "__doc__": cls.__doc__})


class _Rewriter(ast.NodeTransformer):
    """Rewrites the calls that Python executes during the import of a module, except those in annotations."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.func = ast.copy_location(ast.Call(ast.Name(_DECLARED, ast.Load()), [node.func], []), node.func)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        skipped = ("annotation", "returns", "body") if is_function else ("annotation",)
        kept = {name: vars(node).pop(name) for name in skipped if name in vars(node)}
        super().generic_visit(node)
        vars(node).update(kept)
        return node


class SourceLoader(SourceFileLoader):
    """Loads a module with its datasets declared."""

    def path_stats(self, path: str) -> Any:
        raise OSError("bytecode is not cached, since other programs may read the cache")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(_Rewriter().visit(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_DECLARED] = declared
        super().exec_module(module)


class SourceFinder:
    """Finds the modules below some top-level packages for `SourceLoader`."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = SourceLoader(spec.loader.name, spec.loader.path)
        return spec
