"""The structure of an experiment: the modules of its models, and what feeds what.

Shapes and connections are observed: the loop of the experiment runs, without a run, until it has called its models and
losses. Models and batches have no memory then (torch's meta device), unless the code needs their values. This executes
the code of a project, so pages call it through `workbench.call`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mlx_runtime.companions.fragments.capturing import built, is_large
from mlx_runtime.config.building import observer
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, main_class
from mlx_runtime.data.loaders import Loader
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.loop.stopping import LoopStopped
from mlx_runtime.runs.checkpoints.groups import members


def describe(overrides: Sequence[str] = (), why: str = "", conf: Path = CONF) -> dict[str, Any]:
    """Return the structure of the experiment in the working directory, as plain data.

        {name, datasets: [row, …], models: [row, …], losses: [row, …], optimizers: [row, …], edges: [[from, to], …],
         failure: [key, line]}

    A row is `{key, name, class, node, shape, parameters, note, modules}`: its key, like `datasets.train` or
    `models.net.layers.0`, which edges name; the key of its node in conf.yaml, if it has one; the shape of its output,
    in which `n` is the first size that equals the number of rows; the number of its parameter values; and the rows of
    the modules in it. The note of a model without a shape says why. The failure is the error in the loop, after the
    key in conf.yaml of the innermost module that raised it, or "".

    Args:
        overrides: Hydra's.
        why: reason not to run the loop, so that there are no shapes and few edges. Empty: run it.
        conf: file to read instead of conf.yaml.
    """
    experiment, cpu = main_class(AN_EXPERIMENT, Path.cwd()), torch.device("cpu")
    config = load_config(experiment, Request.of(overrides, fast=True), conf, title=str(CONF))
    nodes: dict[str, Any] = {}
    observer.set(nodes.__setitem__)
    for on_meta in (True, False):
        watch, problem = _Watch(), why
        with built(experiment, config, cpu, on_meta=on_meta, follow=watch.follow) as (groups, run_loop):
            keys = {id(module): key for key, module in nodes.items()}
            roots = {
                f"{group}.{name}": module
                for group in ("models", "losses")
                for name, module in members(groups.get(group), nn.Module).items()
            }
            watch.attach(roots)
            try:
                if not why:
                    with watch:
                        run_loop()
            except MlxError as error:
                problem = short_message(error).removesuffix(" (raised on rank 0)")
        missing = {key for key in watch.missing if key.startswith("models.")}
        if why or not problem or not missing or is_large(config.tree, cpu):
            break
    note = f"no shape: {problem or 'its forward was not called in the first batches'}"
    models = [
        _row(module, key, watch.shapes, keys) | {"note": note * (key in missing)}
        for key, module in roots.items()
        if key.startswith("models.")
    ]
    mapping = getattr(groups.get("models"), "map_params_to_optimizers", {})
    return {
        "name": config.cfg.name,
        **{group: _parts(config.tree, group) for group in ("datasets", "losses", "optimizers")},
        "models": models,
        "edges": [*watch.edges, *_to_optimizers(mapping, watch.edges)],
        "failure": [next((keys[id(item)] for item, *_ in watch.calls[::-1] if id(item) in keys), ""), problem],
    }


class _Watch(TorchFunctionMode):
    """Records the shapes of outputs, and which modules and datasets the inputs of each module come from.

    Within the block, each tensor has a set of keys: of the last modules, or else datasets, that it was computed from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, str] = {}  # by the id of the module
        self.edges: dict[tuple[str, str], None] = {}
        self.missing: set[str] = set()  # models and losses that have not been called
        self.calls: list[tuple[nn.Module, set[str], set[str]]] = []  # in progress, with the sources of their inputs,
        # and the keys and sources of the modules that they have called
        self._rows = 0  # of the last batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        _mark(args[:1] if made is None else made, _sources((args, kwargs, made)))  # None: wrote into the first
        return made

    def follow(self, loader: Loader) -> Loader:
        """Return a loader whose batches are marked with their dataset."""

        def marked(loader: Loader) -> Iterator[Any]:
            for batch in Loader.__iter__(loader):
                self._rows = loader.batch_size
                _mark(batch, {f"datasets.{loader.shard.name}"})
                yield batch

        loader.__class__ = type("Loader", (Loader,), {"__iter__": marked})
        return loader

    def attach(self, roots: Mapping[str, nn.Module]) -> None:
        """Add hooks to models and losses, and to the modules in them. They end the loop after the last root."""
        self.missing = {*roots}
        for root, model in roots.items():
            for key, module in model.named_modules(prefix=root):
                self._hook(key, module)

    def _hook(self, key: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            sources = _sources((args, kwargs))
            for *_others, inner in self.calls:
                inner |= {key, *sources}
            self.calls.append((module, sources, set()))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            called = None
            while called is not module:  # those above it have raised an exception
                called, sources, inner = self.calls.pop()
            self.shapes.setdefault(id(module), ", ".join(map(self._shape, _tensors(output))))
            if not inner or len(_sources(output)) > 1:  # paths join in it, such as those of a residual
                self.edges |= {(source, key): None for source in sorted(sources - inner)}
                _mark(output, {key})
            self.missing.discard(key)
            if not self.missing:
                raise LoopStopped

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _shape(self, tensor: torch.Tensor) -> str:
        sizes = [str(size) for size in tensor.shape]
        if self._rows in tensor.shape:
            sizes[tensor.shape.index(self._rows)] = "n"
        return f"({', '.join(sizes)})"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def _sources(value: Any) -> set[str]:
    return {key for item in _tensors(value) for key in getattr(item, "_mlx_sources", ())}


def _mark(value: Any, sources: set[str]) -> None:
    for item in _tensors(value):
        if not isinstance(item, nn.Parameter):
            item._mlx_sources = sources  # type: ignore[attr-defined]


def _row(module: nn.Module, key: str, shapes: Mapping[int, str], nodes: Mapping[int, str]) -> dict[str, Any]:
    """Return the row of a module; shapes and nodes are by the id of the module."""
    return _empty(key, type(module).__name__, nodes.get(id(module), "")) | {
        "shape": shapes.get(id(module), ""),
        "parameters": sum(item.numel() for item in module.parameters() if not is_lazy(item)),
        "modules": [
            _row(child, f"{key}.{name}", shapes, nodes)
            for name, child in module._modules.items()  # also those that have a second name
            if child is not None
        ],
    }


def _empty(key: str, kind: str, node: str) -> dict[str, Any]:
    return {
        "key": key,
        "name": key.rpartition(".")[2],
        "class": kind,
        "node": node,
        "shape": "",
        "parameters": 0,
        "note": "",
        "modules": [],
    }


def _parts(tree: Mapping[str, Any], group: str) -> list[dict[str, Any]]:
    """Return the rows of a group in conf.yaml."""
    nodes = {f"{group}.{name}": node for name, node in tree.get(group, {}).items() if isinstance(node, dict)}
    return [_empty(key, str(node.get("_target_")).rpartition(".")[2], key) for key, node in nodes.items()]


def _to_optimizers(mapping: Mapping[str, str], edges: Mapping[tuple[str, str], None]) -> list[tuple[str, str]]:
    """Return the edges to optimizers: from the losses of the models that they train, or from models without one."""

    def last(model: str) -> list[str]:
        to_losses = [edge for edge in edges if edge[1].startswith("losses.")]
        return [end for start, end in to_losses if f"{start}.".startswith(f"{model}.")] or [model]

    return [
        (start, f"optimizers.{optimizer}") for model, optimizer in mapping.items() for start in last(f"models.{model}")
    ]
