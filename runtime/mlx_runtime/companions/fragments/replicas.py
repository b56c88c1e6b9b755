"""Replicas of the models that train on their own, and are averaged every `cfg.replicas.every` updates.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767) adopts the mean of the replicas'
weights. DiLoCo (Douillard et al., arXiv 2311.08105) makes the difference between the last common weights and that mean
the gradient of an outer optimizer, SGD with Nesterov momentum; `lr=1, momentum=0` is local SGD.

A replica is a worker, or the workers that share one model. A checkpoint is saved at an average, when the weights of all
replicas are equal.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mlx_runtime import companions
from mlx_runtime.companions.fragments.averaging import (
    Tensors,
    means,
    modules_of,
    outer_step,
    saved_tensors,
    wide,
)
from mlx_runtime.distributed.collectives import gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import broadcast_tensors
from mlx_runtime.errors import MlxError
from mlx_runtime.importing import after_import
from mlx_runtime.runs.checkpoints.groups import members

RANK = 4
"""Rank of the matrices that the hook `powersgd` sends."""


def problems(cfg: Any) -> list[str]:
    """Return one line per setting that contradicts `cfg.replicas`."""
    found, wanted = [], cfg.replicas
    if wanted.every is None:
        for name, default in (("lr", 1.0), ("momentum", 0.0)):
            if (value := getattr(wanted, name)) != default:
                found.append(f"cfg.replicas.{name}={value} needs cfg.replicas.every, the updates between two averages")
        if wanted.traffic is not None and cfg.strategy != "ddp":
            found.append(f"cfg.replicas.traffic={wanted.traffic} without cfg.replicas.every requires cfg.strategy=ddp")
        return found
    if cfg.strategy == "fsdp":
        found.append(f"cfg.replicas.every={wanted.every} requires cfg.strategy=ddp or pipeline, not fsdp")
    if not 0 <= wanted.momentum < 1:
        found.append(f"cfg.replicas.momentum={wanted.momentum} must be at least 0 and less than 1")
    if wanted.traffic == "powersgd":
        found.append("cfg.replicas.traffic=powersgd compresses gradients; with cfg.replicas.every, use fp16")
    if cfg.precision == "fp16":
        found.append(
            "cfg.precision=fp16 may skip an update on one replica, so that the others would wait forever; use bf16"
        )
    return found


def topology_of(cfg: Any, topology: Topology) -> Topology:
    """Return the position of a worker whose models `prepare_model` does not wrap as usual."""
    after_import("ray.train", lambda: companions.part("ray.private").keep_sharded_models())
    make = EqualAtFirst() if cfg.replicas.every is not None else compressed_gradients(cfg.replicas.traffic)
    return replace(topology, replicate=make)


class EqualAtFirst:
    """Gives all workers the weights of rank 0, as DDP does. Gradients stay local."""

    def __init__(self) -> None:
        self.prepared: list[nn.Module] = []

    def __call__(self, model: nn.Module, **options: Any) -> nn.Module:
        self.prepared.append(model)
        broadcast_tensors([item.data for item in (*model.parameters(), *model.buffers())])
        return model


def compressed_gradients(traffic: str) -> Callable[..., nn.Module]:
    """Return a constructor of DDP wrappers that compress the gradients of every step, by the hooks of torch."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def replicate(model: nn.Module, **options: Any) -> nn.Module:
        wrapped = DistributedDataParallel(model, **options)
        if traffic == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=10)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    return replicate


@contextlib.contextmanager
def averages(session: Any) -> Iterator[None]:
    """Average the replicas of a run while the block runs. Every worker must enter it."""
    context, notice = session.context, session.reporter.notice
    topology = context.topology
    if topology.data_parallel_size == 1:
        notice("without other replicas, cfg.replicas.every has no effect")
        yield
        return
    session.replicated = False
    sizes = " + ".join(str(len(ranks)) for ranks in topology.replicas)
    each = "one per worker" if topology.model_parallel_size == 1 else f"of {sizes} workers"
    every = f"averaged every {context.cfg.replicas.every} updates"
    notice(f"replicas  {topology.data_parallel_size}, {each}, {every}")
    made = Averages(session)
    session.waits, session.before_save = made.waits, made.finish
    context.groups.experiment.replicas_common = made
    context.groups.experiment.replicas_own = made.own
    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(made.before_update).remove)
        stack.callback(register_optimizer_step_post_hook(made.after_update).remove)
        yield


@dataclass
class Period:
    """The updates of one optimizer since the last average."""

    updates: int = 0
    rounds: int = 0  # averages taken
    common: dict[str, torch.Tensor] = field(default_factory=dict)  # at the last average; empty before the first update
    momentum: dict[str, torch.Tensor] = field(default_factory=dict)  # of the outer optimizer


class Averages:
    """Averages the models of each optimizer after every `cfg.replicas.every` of its updates.

    Every worker calls the hooks at the same updates. As a part of checkpoints, it has what the replicas have in common
    besides their weights.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._groups, self._topology = session.context.groups, session.context.topology
        self._wanted = session.context.cfg.replicas
        alone = self._topology.model_parallel_size == 1
        self._pipeline = None if alone else session.optimization.strategy
        self._names: dict[int, tuple[str | None, Optimizer]] = {}  # by id; kept optimizers keep ids unique
        self._waited = 0  # steps, since a checkpoint is due
        self._periods: dict[str, Period] = {}
        self.own = Own(self)

    # -- hooks of optimizers

    def before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Remember the common weights, at the first update of a period."""
        name = self._name_of(optimizer)
        if name is None:
            return
        if name in self.own.states:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": self.own.states.pop(name), "param_groups": groups})
        period = self._periods.setdefault(name, Period())
        if not period.updates:
            period.common = {path: wide(item) for path, item in self._tensors(optimizer).params.items()}

    def after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Count an update, and average the models if it ends a period."""
        name = self._name_of(optimizer)
        if name is None:
            return
        period = self._periods[name]
        period.updates += 1
        if period.updates == self._wanted.every:
            self._average(period, optimizer)

    # -- checkpoints

    def waits(self) -> bool:
        """Return True if a checkpoint that is due should wait for the next average.

        Optimizers that step in turn may never average at the same step, so it waits for one period at most.
        """
        self._waited += 1
        return self._waited <= self._wanted.every and any(item.updates for item in self._periods.values())

    def finish(self) -> None:
        """Average the models of optimizers that are within a period, before a checkpoint."""
        self._waited = 0
        for name, optimizer in self.optimizers().items():
            if name in self._periods and self._periods[name].updates:
                self._average(self._periods[name], optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {name: {"rounds": item.rounds, "momentum": item.momentum} for name, item in self._periods.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        held = saved_tensors(self._models())  # without those of other stages
        for name, item in state.items():
            momentum = {path: tensor for path, tensor in item["momentum"].items() if path in held}
            self._periods[name] = Period(rounds=item["rounds"], momentum=momentum)

    # -- exchanges

    def _average(self, period: Period, optimizer: Optimizer) -> None:
        tensors, wanted = self._tensors(optimizer), self._wanted
        moved = {name: period.common[name] - item for name, item in tensors.params.items()}
        buffers = {name: wide(item) for name, item in tensors.buffers.items()}
        everything = {**moved, **buffers}
        groups = [(dist.group.WORLD, [*everything])]
        if self._pipeline is not None:
            groups = self._pipeline.peers_of(modules_of(self._models()), everything)
        found: dict[str, torch.Tensor] = {}
        sent = 0
        for group, names in groups:
            half = wanted.traffic is not None
            mean, size = means({name: moved[name] for name in names if name in moved}, group, half=half)
            # Buffers are never rounded: running variances may exceed the range of float16.
            exact, rest = means({name: buffers[name] for name in names if name in buffers}, group, half=False)
            found |= mean | exact
            sent += size + rest
        momentum, period.momentum = period.momentum, {}
        with torch.no_grad():
            for name, item in tensors.params.items():
                before = momentum.get(name)
                weights, after = outer_step(period.common[name], before, found[name], wanted.lr, wanted.momentum)
                item.copy_(weights)
                if after is not None:
                    period.momentum[name] = after
            for name, item in tensors.buffers.items():
                item.copy_(found[name])
        period.common = {}
        period.updates, period.rounds = 0, period.rounds + 1
        if self._pipeline is not None and (each := gather(sent)) is not None:
            sent = sum(each[rank] for rank in self._topology.replicas[0])
        self._record({"bytes": sent, "averaged": self._topology.data_parallel_size, "round": period.rounds})

    def _record(self, numbers: Mapping[str, float]) -> None:
        """Record the numbers of an average after those of earlier steps. Every worker must call this."""
        self._session.metrics.receive()  # no worker waits: all have started this exchange before they averaged
        if self._topology.writes:
            progress = self._session.progress
            values = {f"replicas/{name}": float(item) for name, item in numbers.items()}
            self._session.reporter.record(values, progress.global_step, progress.epoch)

    # -- the experiment's objects

    def optimizers(self) -> dict[str, Optimizer]:
        return members(self._groups["optimizers"], Optimizer) | members(self._groups["own"], Optimizer)

    def _name_of(self, optimizer: Optimizer) -> str | None:
        """Return the name of an optimizer of the experiment's models, or None for any other."""
        if id(optimizer) not in self._names:
            name = next((name for name, item in self.optimizers().items() if item is optimizer), None)
            trains = self._tensors(optimizer).count
            prepared = {str(number): item for number, item in enumerate(self._topology.replicate.prepared)}
            if (trains and name is None) or (not trains and Tensors(prepared, optimizer).count):
                raise MlxError(
                    "cfg.replicas.every averages models and optimizers of the experiment, but this optimizer or its "
                    "model is not on self; assign them: self.models.net = prepare_model(net), self.optimizer = ..."
                )
            self._names[id(optimizer)] = name if trains else None, optimizer
        return self._names[id(optimizer)][0]

    def _models(self) -> dict[str, Any]:
        return {**self._groups.members("own"), **self._groups.members("models")}

    def _tensors(self, optimizer: Optimizer) -> Tensors:
        return Tensors(self._models(), optimizer)


class Own:
    """The states of a worker's optimizers, as a part of checkpoints. Those of rank 0 are in the checkpoint anyway."""

    per_worker = True

    def __init__(self, averages: Averages) -> None:
        self._averages = averages
        self.states: dict[str, Any] = {}  # restored ones, until the first update of their optimizer

    def state_dict(self) -> dict[str, Any]:
        made = self._averages
        writes = made._topology.writes
        states = {} if writes else {name: item.state_dict()["state"] for name, item in made.optimizers().items()}
        return {"optimizers": states | self.states, "held": self._held()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["held"] == self._held():
            self.states = dict(state["optimizers"])  # the loop may still load those of rank 0
            return
        self._averages._session.reporter.notice(
            "replicas  continue with the optimizer states of the first one, because models are cut differently now"
        )

    def _held(self) -> str:
        """Return a digest of the stages of all tensors; empty without pipelines."""
        pipeline = self._averages._pipeline
        return "" if pipeline is None else str(pipeline.held())
