"""Declarations of datasets, pretrained models and Flax NNX modules, so that importing `src` neither loads nor computes:
defaults such as `train: TrainDataset = TrainDataset()` and `net: PreTrainedModel = AutoModel.from_pretrained(...)`.

`defer_loading`, which `src/__init__.py` calls, has the modules of `src` rewritten as they are compiled. A call `f(x)`
that Python executes during the import, such as one in a default, becomes `__deferred__(f)(x)()`. Once its arguments are
known, that is a `Declaration` if `f` is a dataset, returns one of Hugging Face, loads trained weights, makes an object
of Flax NNX, or gets a declaration of such weights or objects as an argument. Otherwise it calls `f`. The bodies of
functions stay as they are.
"""

import ast
import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence, Set
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from mlx_runtime.importing import after_import

_DEFERRED = "__deferred__"


class Declaration:
    """A dataset or model that is not constructed yet: its class or function, and the arguments of the call."""

    __slots__ = ("args", "kwargs", "target")

    def __init__(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs

    def make(self) -> Any:
        """Construct the object, after the declared objects among its arguments."""
        return self.target(*_make(self.args), **_make(self.kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unmade(f"has no attribute {name!r}")

    def __getitem__(self, item: Any) -> Any:
        raise self._unmade("has no items")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._unmade("cannot be called")

    def _unmade(self, why: str) -> AttributeError:
        name = self.target.__qualname__
        cure = f"make it a default of a constructor, or call {name} in the function that uses it"
        return AttributeError(f"{name}() is not constructed while src is imported, so it {why}; {cure}")

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.target.__qualname__}({', '.join(arguments)})"


def _make(value: Any) -> Any:
    if isinstance(value, Declaration):
        return value.make()
    if type(value) in (list, tuple):
        return type(value)(map(_make, value))
    if type(value) is dict:
        return {name: _make(item) for name, item in value.items()}
    return value


HF_DATASETS = {"datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"}
"""Classes of Hugging Face, by name because few projects import them."""


def is_dataset(cls: Any) -> bool:
    """Return True if `cls` is a class of datasets: of torch, of Hugging Face, or with `to_hf()`. Imports neither."""
    return hasattr(cls, "to_hf") or _derives_from(cls, {"torch.utils.data.dataset.Dataset", *HF_DATASETS})


def is_hf_dataset(cls: Any) -> bool:
    """Return True if `cls` is the `Dataset` or `IterableDataset` of Hugging Face, or derived from one."""
    return _derives_from(cls, HF_DATASETS)


def _derives_from(cls: Any, names: Set[str]) -> bool:
    return isinstance(cls, type) and any(f"{base.__module__}.{base.__qualname__}" in names for base in cls.__mro__)


def returns_hf_dataset(function: Any) -> bool:
    """Return True if a function is annotated to return a Hugging Face dataset, like `datasets.load_dataset`."""
    return "datasets" in sys.modules and any(map(is_hf_dataset, _returned_types(function)))


def _returned_types(function: Any) -> Sequence[Any]:
    """Return the types that a function is annotated to return."""
    if "return" not in getattr(function, "__annotations__", {}):
        return ()
    try:
        hint = typing.get_type_hints(function)["return"]
    except Exception:  # annotations are arbitrary expressions
        return ()
    return typing.get_args(hint) or (hint,)


def defer_callee(callee: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Return a function that takes the arguments of a call, and returns a function without arguments for the call.

    The result of the call is a Declaration if it would yield data or pretrained weights. The module itself makes the
    call, so that warnings name it, and that `namedtuple` finds it.
    """
    if is_pretrained(callee):
        return functools.partial(functools.partial, _declare_pretrained, callee)
    if is_data(callee):
        return functools.partial(functools.partial, Declaration, callee)
    if is_nnx(callee):
        return functools.partial(functools.partial, _declare_nnx, callee)
    if callee is not functools.partial and library_of(callee) in sys.stdlib_module_names:
        return functools.partial(functools.partial, callee)  # like `field`, which may hold declarations
    return functools.partial(_call_or_declaration, callee)


def declare_call(callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a class or function, or declare the call."""
    return defer_callee(callee)(*args, **kwargs)()


def is_data(callee: Any) -> bool:
    """Return True if a class or function makes a dataset."""
    return is_dataset(callee) or is_dataset(getattr(callee, "__self__", None)) or returns_hf_dataset(callee)


def is_nnx(callee: Any) -> bool:
    """Return True if a class or function makes an object of Flax NNX, like a module or `Rngs`. Does not import Flax."""
    kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    if kind is None:
        return False
    made = (callee, getattr(callee, "__self__", None), *_returned_types(callee))
    return any(isinstance(item, type) and issubclass(item, kind) for item in made)


def _declare_nnx(callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Declaration:
    """Declare a call. `rngs=nnx.Rngs()`, without streams, satisfies type checkers; a run passes streams of its own."""
    items = inspect.signature(callee.__init__ if isinstance(callee, type) else callee).parameters  # type: ignore[misc]
    names = [name for name, item in items.items() if item.kind <= item.POSITIONAL_OR_KEYWORD]
    del names[: isinstance(callee, type)]  # self
    if "rngs" in names[: len(args)] and len(args) <= len(names):  # it has no place in conf.yaml
        kwargs, args = {**kwargs, **dict(zip(names, args, strict=False))}, ()
    rngs = kwargs.get("rngs")
    if isinstance(rngs, Declaration) and not (rngs.args or rngs.kwargs):
        del kwargs["rngs"]
    return Declaration(callee, *args, **kwargs)


def is_jax_array(value: Any) -> bool:
    """Return True for an array of JAX, which has therefore computed. Does not import JAX."""
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


FROM_PRETRAINED = {"diffusers", "huggingface_hub", "peft", "timm", "transformers"}
"""Libraries whose classes have `from_pretrained`, which users' classes may inherit."""


def library_of(function: Any) -> str:
    """Return the library that defines a function, even if it is called on a subclass elsewhere."""
    return str(getattr(function, "__module__", "")).partition(".")[0]


def is_pretrained(target: Any) -> bool:
    """Return True for functions of libraries that may load pretrained weights, tokenizers and the like.

    A `from_pretrained` that the user defines is an ordinary function.
    """
    name, library = getattr(target, "__name__", ""), library_of(target)
    if name == "from_pretrained":
        return library in FROM_PRETRAINED
    path = f"{getattr(target, '__module__', '')}.{name}"
    if path.startswith("torchvision.models.") and inspect.isfunction(target):
        return not path.startswith("torchvision.models._api.") or name == "get_model"  # that module has `list_models`
    return (library, name) == ("timm", "create_model") or path in ("torch.jit._serialization.load", "torch.hub.load")


def _declare_pretrained(callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Declaration:
    """Declare a call, with the name of the repository as a keyword if the signature hides that parameter.

    The signature of `AutoModel.from_pretrained` of transformers is `(*model_args, **kwargs)`.
    """
    if library_of(callee) == "transformers" and len(args) == 1:
        first = next(iter(inspect.signature(callee).parameters.values()))
        if first.kind is first.VAR_POSITIONAL:
            return Declaration(callee, pretrained_model_name_or_path=args[0], **kwargs)
    return Declaration(callee, *args, **kwargs)


def _call_or_declaration(callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    function = getattr(callee, "__init__", None) if isinstance(callee, type) else callee
    defaults = (getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None))
    if any(map(is_loaded_later, (args, kwargs, *defaults))):
        return functools.partial(Declaration, callee, *args, **kwargs)
    return functools.partial(callee, *args, **kwargs)


def is_loaded_later(value: Any) -> bool:
    """Return True for a declaration of a model, and for containers of one."""
    if isinstance(value, Declaration):
        return not is_data(value.target)
    if isinstance(value, tuple | list | dict):
        return any(map(is_loaded_later, value.values() if isinstance(value, dict) else value))
    return False


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


class CallRewriter(ast.NodeTransformer):
    """Rewrites calls `f(x)` as `hook(f)(x)()`, except in annotations and, without `bodies`, in functions."""

    def __init__(self, hook: str, *, bodies: bool) -> None:
        self._hook, self._bodies = hook, bodies

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.func = ast.copy_location(ast.Call(ast.Name(self._hook, ast.Load()), [node.func], []), node.func)
        return ast.copy_location(ast.Call(node, [], []), node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        skipped = ("annotation", "returns", "body") if is_function and not self._bodies else ("annotation", "returns")
        kept = {name: vars(node).pop(name) for name in skipped if name in vars(node)}
        super().generic_visit(node)
        vars(node).update(kept)
        return node


class SourceLoader(SourceFileLoader):
    """Loads a module with its datasets declared, if the loading of its package is deferred."""

    def path_stats(self, path: str) -> Any:
        raise OSError("bytecode is not cached, because other programs may read the cache")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        if any(f"{self.name}.".startswith(f"{package}.") for package in deferred):
            tree = ast.fix_missing_locations(CallRewriter(_DEFERRED, bodies=False).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_DEFERRED] = defer_callee
        super().exec_module(module)


deferred: set[str] = set()
"""Packages whose loading is deferred, which are the user's own."""


def defer_loading(package: str) -> None:
    """Import the other modules of a package without loading the datasets and pretrained models in their defaults.

    Called in `src/__init__.py`, before other modules of the package are imported. Calls that Python executes while it
    imports them, such as `train: Rows = Rows()`, are recorded if they construct a dataset or load trained weights; the
    workers of a run make them. The functions of the package, and all other packages, stay as they are.

    Args:
        package: `__name__` of the package.
    """
    deferred.add(package)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
        after_import("torch.optim.optimizer", _leave_out_compiler)


def _leave_out_compiler() -> None:
    """Let optimizers be constructed without torch's compiler, whose import takes a CPU second; their steps need it."""
    function = getattr(sys.modules["torch.optim.optimizer"].Optimizer.add_param_group, "__wrapped__", None)
    if function is not None:
        setattr(function, "__dynamo_disable", function)


class _Finder:
    """Finds the modules of top-level packages whose loading is deferred. `runs.snapshots` finds others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in deferred:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = SourceLoader(spec.loader.name, spec.loader.path)
        return spec
