"""The first call of a model by the loop of an experiment, with rows from its own loaders."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.companions.fragments.scripted import opened
from mlx_runtime.companions.fragments.tracing import available_bytes
from mlx_runtime.companions.sharding.building import build_models
from mlx_runtime.config.building import build, without_weights
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.data.loaders import Loader
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import USER_ERRORS, UsageError, suggest
from mlx_runtime.events import RunInfo
from mlx_runtime.loop.assembly import build_experiment, dataset_shards
from mlx_runtime.loop.experiment import BaseModule, attach
from mlx_runtime.loop.job import Cluster, Job
from mlx_runtime.loop.optimization import prepare_models
from mlx_runtime.loop.stopping import LoopStopped
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.workers.worker import enter_ray_train, loop_errors

SHARE_FOR_MODELS = 0.25
"""Share of free memory above which models are built on the meta device."""


class Call(NamedTuple):
    """A call of a model, before it has begun."""

    name: str  # in the group `models`
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    optimizers: list[Optimizer]


class _NoSession:
    """Stands for the session of a run until a model is called: loaders are read, and nothing is recorded."""

    progress = SimpleNamespace(global_step=0)
    checkpoints = SimpleNamespace(restore=lambda: None)

    def watch(self, loader: Any) -> Any:
        return loader

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _Opened(DDP):
    """Builds models whose blocks can be seen; without memory, if they are too large for this machine."""

    def build(self, node: Mapping[str, Any]) -> Any:
        on_meta = self.topology.device.type == "meta"
        group = build_models(node, elsewhere=True) if on_meta else super().build(node)
        for name, model in members(group, nn.Module).items():
            setattr(group, name, opened(model))
        return group


def capture(experiment: type[BaseModule], config: RunConfig, name: str | None, device: torch.device) -> Call:
    """Run the loop of an experiment until it calls a model for training. Nothing is trained or stored.

    Pretrained weights are not downloaded, and models too large for this machine are built without memory.

    Args:
        experiment: class of the experiment.
        config: its config.
        name: of the model; None for the largest.
        device: on which it runs.

    Raises:
        UsageError: there is no such model, or the loop does not call it.
        ConfigError, WorkerLoopError: an object cannot be built, or the loop fails.
    """
    cfg, on_meta, calls = config.cfg, is_large(config.tree, device), list[Call]()
    with built(experiment, config, device, on_meta=on_meta) as (groups, run_loop):
        models = members(groups.get("models"), nn.Module)
        name = _chosen(models, name)
        prepare_models([models[name]], SimpleNamespace(precision=cfg.precision, compile=False), device)
        optimizers = list(members(groups.get("optimizers"), Optimizer).values())

        def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if model.training and torch.is_grad_enabled():
                calls.append(Call(name, model, args, kwargs, optimizers))
                raise LoopStopped

        hook = models[name].register_forward_pre_hook(before_forward, with_kwargs=True)
        try:
            run_loop()
        finally:
            hook.remove()
    if not calls:
        raise UsageError(f"worker_loop of {experiment.__name__} does not call models.{name} with gradients")
    return calls[0]


@contextlib.contextmanager
def built(
    experiment: type[BaseModule],
    config: RunConfig,
    device: torch.device,
    *,
    on_meta: bool,
    follow: Callable[[Loader], Loader] = lambda loader: loader,
) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Provide the groups of an experiment within the block, and a function that runs its loop, without a run.

    The loop runs to its end, or until a hook raises `LoopStopped`. Nothing is trained or stored, and pretrained weights
    are not downloaded.

    Args:
        experiment: class of the experiment.
        config: its config.
        device: on which it runs.
        on_meta: build models without memory; batches have none either.
        follow: called with each new loader, and returns the one that the loop uses.
    """
    cfg, tree = config.cfg, config.tree
    topology = Topology(0, 1, torch.device("meta") if on_meta else device)
    here = Cluster("", 1, 0, in_driver=True, reads_streams=True)  # Ray is not refused
    run = RunInfo(cfg.name, "none", Path(), "", tree, 0)
    target, project = f"{experiment.__module__}.{experiment.__qualname__}", Path.cwd()
    job = Job(target, tree, run, str(project), project, here, False, {}, {}, (("", 0), b""), evaluate=False)
    enter_ray_train(job)
    strategy = _Opened(cfg, topology)

    def run_loop() -> None:
        if streams := stream_names(tree):
            raise UsageError(f"datasets.{streams[0]} is a stream of Ray Data, which this command does not read")
        read_here = replace(cfg, loader="auto")  # without processes
        with loop_errors(0, project), contextlib.suppress(LoopStopped):
            attach(made, _NoSession())  # type: ignore[arg-type]
            made.worker_loop(dataset_shards(read_here, groups.get("datasets"), job, strategy, follow))

    with topology.entered(), without_weights(), loop_errors(0, project):
        groups, made = build_experiment(job, topology, cfg, strategy)
        for model in members(groups.get("models"), nn.Module).values() if on_meta else ():
            model.to = lambda *_, model=model, **__: model  # there are no values to move
        yield groups, run_loop


def is_large(tree: dict[str, Any], device: torch.device) -> bool:
    """Return True if the weights and gradients would take much of the free memory."""
    try:
        with without_weights(), torch.device("meta"):
            models = members(build(tree["models"], "models"), nn.Module).values()
    except USER_ERRORS:  # constructors may need real tensors
        return False
    params = {param for model in models for param in model.parameters()}
    needed: int = sum(item.nbytes * (1 + item.requires_grad) for item in params)
    return needed > SHARE_FOR_MODELS * available_bytes(device)


def _chosen(models: Mapping[str, nn.Module], name: str | None) -> str:
    if not models:
        raise UsageError("the experiment has no models to plan")
    if name is not None and name not in models:
        raise UsageError(f"there is no model {name!r}.{suggest(name, models)}")
    return name or max(models, key=lambda item: sum(param.numel() for param in models[item].parameters()))
