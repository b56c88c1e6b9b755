"""Pipelines: each worker holds consecutive parts of the models, which work on different microbatches."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mlx_runtime import companions
from mlx_runtime.companions.fragments.cutting import Cut, cut, tensors_of
from mlx_runtime.companions.fragments.scripted import taken
from mlx_runtime.companions.sharding.aliasing import raw
from mlx_runtime.companions.sharding.blocks import blocks_of, recompute_blocks, select_modules
from mlx_runtime.companions.sharding.building import (
    build_models,
    check_same,
    check_unshared,
    check_values,
    contents,
    deferred_models,
    initialize_whole,
    own_strategies,
)
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.randomness import load_random_state_dict, random_state_dict
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.importing import after_import
from mlx_runtime.loop.options import strategy_problems
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.runs.tables import plural
from mlx_runtime.storage.files import size_text

_CPU = torch.device("cpu")


class Pipeline(DDP):
    """Cuts models into stages, one per worker. A model to which `Models.strategies` gives `ddp` is on the last one."""

    shards = True
    stores_shards = False  # rank 0 collects whole models
    preloads = ("mlx_runtime.companions.fragments.pipelined",)

    @staticmethod
    def refusal(cfg: Any) -> str | None:
        fragments = cfg.fragments
        if cfg.sharding.shard_size is not None or cfg.sharding.offload != "none":
            return "cfg.sharding is for cfg.strategy=fsdp; remove it"
        if cfg.compile:
            return "cfg.compile compiles whole models; set it to false"
        if fragments.stages == 1:
            return "cfg.fragments.stages=1 does not cut the models; use cfg.strategy=ddp"
        try:
            plan = _plan(cfg)
        except ConfigError as error:
            return str(error)
        if plan is not None and cfg.elastic.keep_global_batch:
            return "cfg.elastic.keep_global_batch counts equal pipelines; remove it, or cfg.fragments.plan"
        if plan is not None and cfg.start_workers != (count := len(plan.nodes)):
            return (
                f"{fragments.plan} is for {count} workers, but cfg.start_workers={cfg.start_workers}; set it to "
                f"{count}, or plan again with `mlx train clusterize cfg.fragments.plan=null`"
            )
        return None

    @staticmethod
    def multiple_of(cfg: Any) -> int:
        plan = _plan(cfg)
        return cfg.fragments.stages or 1 if plan is None else len(plan.nodes)

    @staticmethod
    def model_parallel_size(cfg: Any, workers: int) -> int:
        if cfg.fragments.plan is not None:
            return 1  # the constructor reads the plan, because pipelines may differ
        stages: int = cfg.fragments.stages or workers
        if workers % stages:
            raise ConfigError(f"cfg.fragments.stages is {stages}; it must divide the {workers} workers")
        return stages

    def __init__(self, cfg: Any, topology: Topology) -> None:
        from mlx_runtime.companions.fragments.planfile import layout_of

        self._layout = layout_of(cfg.fragments, topology)
        ranks = self._layout.ranks
        size = max(map(len, ranks))
        if size == 1 and cfg.replicas.every is None:  # `prepare_model` must not average gradients, too
            topology = replace(topology, replicate=_unchanged)
        super().__init__(cfg, replace(topology, model_parallel_size=size, replica_ranks=ranks))
        self._holders: list[Any] = []  # by model
        after_import("ray.train", lambda: companions.part("ray.private").keep_sharded_models())

    @cached_property
    def _links(self) -> Any:
        from mlx_runtime.companions.fragments.links import Links

        links = Links(self.topology, self.cfg.fragments.traffic)
        links.syncs = self.cfg.replicas.every is None
        return links

    def build(self, node: Mapping[str, Any]) -> Any:
        topology, deferred = self.topology, deferred_models(node)
        group = build_models(node, elsewhere=not topology.writes)
        models = {name: taken(model) for name, model in members(group, nn.Module).items()}
        for name, model in models.items():
            setattr(group, name, model)
            if topology.writes and name in deferred:
                initialize_whole(name, model)
            check_values(name, model, elsewhere=not topology.writes)
        drawn = broadcast(random_state_dict(_CPU))  # from rank 0, which has drawn the values of models
        load_random_state_dict(drawn, _CPU)
        check_same(contents(models), topology)
        check_unshared(models, {*models}, "cut; make one model of both, or use cfg.strategy=ddp")
        blocks = blocks_of(group, models)
        own = own_strategies(node, self.cfg)
        if found := strategy_problems(replace(self.cfg, strategy="pipeline")):  # it may be that of some models only
            raise ConfigError(found[0])
        for name, strategy in own.items():
            if strategy not in ("ddp", "pipeline"):
                raise ConfigError(f"Models.strategies[{name!r}] is {strategy!r}; with pipelines, it is ddp or pipeline")
        for name, model in models.items():
            self._cut(name, model, blocks[name], whole=own.get(name, self.cfg.strategy) == "ddp")
        if self._layout.model is not None and self._layout.model not in models:
            raise ConfigError(f"cfg.fragments.plan={self.cfg.fragments.plan} is for another model; see its `model`")
        return group

    def _cut(self, name: str, model: nn.Module, blocks: list[str], *, whole: bool) -> None:
        from mlx_runtime.companions.fragments.holders import Holders
        from mlx_runtime.companions.fragments.pipelined import Pipelined

        links, layout = self._links, self._layout
        planned = layout.model == name and not whole
        if planned:
            blocks = list(layout.blocks)
        all_ends = layout.ends if planned else [None] * len(layout.ranks)
        cuts = [
            Cut({"": len(ranks) - 1}, {}) if whole else cut(name, model, blocks, len(ranks), ends)
            for ranks, ends in zip(layout.ranks, all_ends, strict=True)
        ]
        self.described += dict.fromkeys(_line(name, model, item) for item in cuts)
        holders = Holders(model, cuts, links)
        self._holders.append(holders)
        recomputed = self.cfg.activation_checkpointing
        paths = select_modules(model, recomputed) if isinstance(recomputed, str) else blocks if recomputed else []
        loose = [title for item in cuts for title in item.loose]
        shared = next((title for title in loose for path in paths if title.startswith(f"{path}.")), None)
        if shared is not None:
            raise ConfigError(
                f"cfg.activation_checkpointing cannot recompute models.{name}.{shared}, which several stages share; "
                "name other modules with a pattern, like 'encoder.*'"
            )
        recompute_blocks({name: model}, {name: blocks}, self.cfg.activation_checkpointing)
        self._distribute(model, holders)
        made = cuts[self.topology.data_parallel_rank]
        Pipelined(name, made, links, holders, 1 if whole else self.cfg.fragments.microbatches).install(model)
        _allow_absent(model)

    def _distribute(self, model: nn.Module, holders: Any) -> None:
        """Move the parts of this stage to the device, with the values of rank 0, and the others to the meta device."""
        topology, swap = self.topology, cast(Any, torch.utils.swap_tensors)
        for name, tensor in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]:
            ranks, value = holders.of(name), tensor.detach()
            empty = torch.empty_like(value, device=topology.device if topology.rank in ranks else "meta")
            if isinstance(tensor, nn.Parameter):
                swap(tensor, nn.Parameter(empty, tensor.requires_grad))  # tied ones stay tied
            else:
                path, _, last = name.rpartition(".")
                setattr(model.get_submodule(path), last, empty)
            if topology.writes:
                value = value.to(topology.device).contiguous()
                for work in [dist.isend(raw(value), rank) for rank in ranks if rank]:
                    work.wait()  # type: ignore[union-attr]
            elif topology.rank in ranks:
                value = torch.empty(value.shape, dtype=value.dtype, device=topology.device)
                dist.recv(raw(value), 0)
            if topology.rank in ranks:
                empty.copy_(value)

    def sync_gradients(self, models: Iterable[object], enabled: bool) -> None:
        self._links.syncs = enabled and self.cfg.replicas.every is None  # otherwise, weights are averaged

    def drop_gradients(self, models: Iterable[object]) -> None:
        pass  # there are none besides those of the parameters

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        parameters = list(parameters)
        norms = torch.zeros(2, len(parameters), device=self.topology.device)  # and the number of workers with each
        for number, param in enumerate(parameters):
            if param.grad is not None:
                norms[0, number], norms[1, number] = torch.linalg.vector_norm(param.grad), 1
        total, holders = self._links.sum_over_stages(norms)
        norm: torch.Tensor = torch.linalg.vector_norm((total / holders)[holders > 0])  # in order, as in one process
        nn.utils.clip_grads_with_norm_([item for item in parameters if item.grad is not None], max_norm, norm)
        return norm

    def scaler(self, *, enabled: bool) -> torch.amp.GradScaler:
        from mlx_runtime.companions.fragments.scaling import StageScaler

        return StageScaler(self._links, enabled=enabled)

    def prepare_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Let optimizers forget the loaded states of parameters of other stages; without gradients, they skip those."""

        def forget(optimizer: Optimizer) -> None:
            for param in [item for item in optimizer.state if item.is_meta]:
                del optimizer.state[param]

        for optimizer in optimizers.values():
            optimizer.register_load_state_dict_post_hook(forget)

    def consolidate(self, states: dict[str, Any]) -> dict[str, Any]:
        """On rank 0, complete the states with those of the other stages of the first pipeline."""
        topology = self.topology
        self._sync_buffers()
        own = {path: leaf for path, leaf in _leaves(states) if not _is_absent(leaf)}
        held = set(broadcast(list(own)))
        mine = {path: leaf for path, leaf in own.items() if path not in held and topology.data_parallel_rank == 0}
        tensors = {path: leaf for path, leaf in mine.items() if isinstance(leaf, torch.Tensor)}
        kinds = {path: (tuple(item.shape), torch.empty(0, dtype=item.dtype)) for path, item in tensors.items()}
        found = gather([*{**mine, **kinds}.items()])
        if found is None:
            for item in tensors.values():
                dist.send(raw(item.detach().to(topology.device).contiguous()), 0)
            return states
        for rank in sorted({*topology.replicas[0]} - {0}):
            for path, value in found[rank]:
                if isinstance(value, tuple):  # the shape and the type of a tensor, which follows
                    received = torch.empty(value[0], dtype=value[1].dtype, device=topology.device)
                    dist.recv(raw(received), rank)
                    value = received.cpu()
                    value.is_copy = True  # type: ignore[attr-defined]  # for `Staging`
                _insert(states, path, value)
        for optimizer in states.get("optimizers", {}).values():
            if isinstance(optimizer.get("state"), dict):
                optimizer["state"] = dict(sorted(optimizer["state"].items()))
        return states

    def _sync_buffers(self) -> None:
        """Give all pipelines the buffers of the first, which are those that a checkpoint contains."""
        if self._links.replicas > 1 and self.cfg.replicas.every is None:
            for holders in self._holders:
                for name, item in holders.model.named_buffers():
                    if not item.is_meta:
                        self._links.broadcast_to_peers(item, holders.of(name))

    def peers_of(self, models: Mapping[str, nn.Module], names: Collection[str]) -> list[tuple[Any, list[str]]]:
        """Group names of tensors, like `net.0.weight`, by the process groups of the workers that hold them."""
        own = {id(item.model): item for item in self._holders}
        everyone = tuple(rank for ranks in self.topology.replicas for rank in ranks)
        found: dict[Any, list[str]] = {ranks: [] for ranks in (*self._links.peers, everyone)}
        for title, model in models.items():
            for path, _ in tensors_of(model, aliases=True):
                if f"{title}.{path}" in names:
                    found[own[id(model)].of(path) if id(model) in own else everyone].append(f"{title}.{path}")
        return [(self._links.peers.get(ranks, dist.group.WORLD), items) for ranks, items in found.items() if items]

    def held(self) -> str:
        """Return a digest of the stages of all tensors in each pipeline, which is the same on all workers."""
        stages = [{name: item.stages_of(name) for name, _ in tensors_of(item.model)} for item in self._holders]
        return hashlib.sha256(json.dumps(stages).encode()).hexdigest()

    def observe(self, session: Any) -> None:
        """Record the bytes that workers send to other stages per update, as often as metrics."""
        done, links, sums = session.step_done, self._links, [0, 0]  # bytes until the last record, and updates since

        def step_done(number: int) -> None:
            done(number)
            sums[1] += session.optimization.accumulation.last
            if not (sums[1] and session.metrics.is_due(session.passes.latest)):
                return
            sent = gather((links.sent - sums[0]) / sums[1])
            sums[:] = links.sent, 0
            if sent is not None:
                each = {f"fragments/bytes/rank_{rank}": item for rank, item in enumerate(sent)}
                session.reporter.record({"fragments/bytes": sum(sent), **each}, number, session.progress.epoch)

        session.step_done = step_done


def _unchanged(model: nn.Module, **_: Any) -> nn.Module:
    return model


def _plan(cfg: Any) -> Any:
    """Return the plan of a run, or None if it has none, or if it is not here, which workers report."""
    from mlx_runtime.companions.fragments.planfile import read

    path = cfg.fragments.plan
    return read(Path(path)) if path is not None and Path(path).exists() else None


class AbsentTensor(torch.Tensor):
    """A weight that another stage holds, in the state of a model. Moving it does nothing, so tools may copy states."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> "AbsentTensor":
        return self


def _allow_absent(model: nn.Module) -> None:
    """Let `load_state_dict` take the state of the whole model, and ignore what this stage does not hold."""

    def mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, item in state.items():
            if isinstance(item, torch.Tensor) and item.is_meta:
                state[name] = item.as_subclass(AbsentTensor)

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, own in module.state_dict(prefix=prefix).items():
            given = state.get(name)
            if isinstance(own, torch.Tensor) and own.is_meta and isinstance(given, torch.Tensor):
                state[name] = torch.empty_like(given, device="meta")  # torch warns about one with values

    model.register_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]  # torch has not annotated it
    model.register_load_state_dict_pre_hook(leave_out)  # type: ignore[no-untyped-call]  # torch has not annotated it


def _line(name: str, model: nn.Module, made: Cut) -> str:
    """Return a line like `net: pipeline of 2 stages with 3 + 2 blocks; 1.2 + 1.3 MB`."""
    stages = 1 + max(made.units.values())
    sizes, blocks = [0] * stages, [0] * stages
    for title, param in model.named_parameters():
        sizes[made.stage_of(title) or 0] += param.numel() * param.element_size()
    for stage in made.units.values():
        blocks[stage] += 1
    if "" in made.units:
        return f"{name}: whole on the last stage; {size_text(sum(sizes))}"
    return (
        f"{name}: pipeline of {plural(stages, 'stage')} with {' + '.join(map(str, blocks))} blocks; "
        f"{' + '.join(map(size_text, sizes))}"
    )


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _insert(states: Any, path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        states = states.setdefault(key, {}) if isinstance(states, dict) else states[key]
    states[path[-1]] = value
