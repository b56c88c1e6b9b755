"""Replicas of the models that train on their own, and are averaged every `cfg.replicas.every` updates.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767) adopts the mean of the replicas'
weights. DiLoCo (Douillard et al., arXiv 2311.08105) makes the difference between the last common weights and that mean
the gradient of an outer optimizer, SGD with Nesterov momentum; `lr=1, momentum=0` is local SGD.

A replica is a worker, or the workers that share one model. A checkpoint is saved at an average, when the weights of all
replicas are equal.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mlx_runtime import companions
from mlx_runtime.companions.fragments.averaging import Tensors, modules_of, outer_step
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
            found.append(f"cfg.replicas.traffic={wanted.traffic} without cfg.replicas.every is for cfg.strategy=ddp")
        return found
    if cfg.strategy == "fsdp":
        text = "is for cfg.strategy=ddp or pipeline; cfg.strategy is fsdp"
        found.append(f"cfg.replicas.every={wanted.every} {text}")
    if not 0 <= wanted.momentum < 1:
        found.append(f"cfg.replicas.momentum is {wanted.momentum}, not from 0 to below 1")
    if wanted.traffic == "powersgd":
        found.append("cfg.replicas.traffic=powersgd compresses gradients; with cfg.replicas.every, use fp16")
    if cfg.precision == "fp16":
        found.append("cfg.precision=fp16 may skip an update on one replica, and others would wait forever; use bf16")
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
    each = "worker" if topology.model_parallel_size == 1 else f"{topology.model_parallel_size} workers"
    every = f"averaged every {context.cfg.replicas.every} updates"
    notice(f"replicas  {topology.data_parallel_size}, one per {each}, {every}")
    made = Averages(session)
    session.waits, session.before_save = made.waits, made.finish
    context.groups.experiment.replicas_common = made.common
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
    common: dict[str, torch.Tensor] | None = None  # at the last average; None until the first update after it
    momentum: dict[str, torch.Tensor] | None = None  # of the outer optimizer


class Averages:
    """Averages the models of each optimizer after every `cfg.replicas.every` of its updates.

    Every worker calls the hooks at the same updates.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._groups, self._topology = session.context.groups, session.context.topology
        self._wanted = session.context.cfg.replicas
        alone = self._topology.model_parallel_size == 1
        self._pipeline = None if alone else session.optimization.strategy
        self._names: dict[
            int, tuple[str | None, Optimizer]
        ] = {}  # by id; the optimizer is kept, so that ids stay unique
        self._waited = 0  # steps, since a checkpoint is due
        self.periods: dict[str, Period] = {}
        self.states: dict[str, Any] = {}  # restored states of this worker's optimizers, until their first update
        self.common = Common(self)
        self.own = Own(self)

    # -- hooks of optimizers

    def before_update(self, optimizer: Optimizer, *_: object) -> None:
        """Remember the common weights, at the first update of a period."""
        name = self._name_of(optimizer)
        if name is None:
            return
        if name in self.states:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": self.states.pop(name), "param_groups": groups})
        period = self.periods.setdefault(name, Period())
        if period.common is None:
            tensors = self._tensors(optimizer)
            period.common = tensors.split(tensors.vector())

    def after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Count an update, and average the models if it ends a period."""
        name = self._name_of(optimizer)
        if name is None:
            return
        period = self.periods[name]
        period.updates += 1
        if period.updates == self._wanted.every:
            self._average(period, optimizer)

    # -- checkpoints

    def waits(self) -> bool:
        """Return True if a checkpoint that is due should wait for the next average.

        Optimizers that step in turn may never average at the same step, so it waits for one period at most.
        """
        self._waited += 1
        return self._waited <= self._wanted.every and any(item.updates for item in self.periods.values())

    def finish(self) -> None:
        """Average the models of optimizers that are within a period, before a checkpoint."""
        self._waited = 0
        for name, optimizer in self.optimizers().items():
            if name in self.periods and self.periods[name].updates:
                self._average(self.periods[name], optimizer)

    # -- exchanges

    def _average(self, period: Period, optimizer: Optimizer) -> None:
        tensors = self._tensors(optimizer)
        assert period.common is not None
        common, momentum = tensors.join(period.common), _momentum(period, tensors)
        mean, sent = self._mean(tensors, tensors.difference(common))
        common, momentum = outer_step(
            common, momentum, mean.to(common), tensors.exact, self._wanted.lr, self._wanted.momentum
        )
        period.momentum = None if momentum is None else tensors.trained.split(momentum)
        tensors.fill(common)
        period.common = None
        period.updates, period.rounds = 0, period.rounds + 1
        if self._pipeline is not None and (each := gather(sent)) is not None:
            sent = sum(each[rank] for rank in self._topology.replicas[0])
        self._record({"bytes": sent, "averaged": self._topology.data_parallel_size, "round": period.rounds})

    def _mean(self, tensors: Tensors, difference: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the mean of the replicas' differences, and the bytes that this worker has sent."""
        if self._pipeline is None:
            return _mean_of(difference, tensors.exact, self._wanted.traffic, dist.group.WORLD)
        pieces, sent = tensors.split(difference.cpu()), 0
        for group, names in self._pipeline.peers_of(modules_of(self._models()), tensors.all):
            part = tensors.only(names)
            own = torch.cat([pieces[name] for name in part.all]).to(part.dtype)
            mean, count = _mean_of(own, part.exact, self._wanted.traffic, group)
            pieces |= part.split(mean.to(difference.dtype))
            sent += count
        return tensors.join(pieces), sent

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
        known = self._names.get(id(optimizer))
        if known is None:
            names = [name for name, item in self.optimizers().items() if item is optimizer]
            name = names[0] if names and len(self._tensors(optimizer)) else None
            if name is None and self._would_diverge(optimizer):
                raise MlxError(
                    "cfg.replicas.every averages models and optimizers of the experiment, but this optimizer or its "
                    "model is not on self; assign them: self.models.net = prepare_model(net), self.optimizer = ..."
                )
            known = self._names[id(optimizer)] = name, optimizer
        return known[0]

    def _would_diverge(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer trains a prepared model, or one of the experiment, that is not averaged."""
        make = self._topology.replicate
        prepared = make.prepared if isinstance(make, EqualAtFirst) else []
        found = {f"prepared_{number}": model for number, model in enumerate(prepared)}
        return bool(len(self._tensors(optimizer)) or len(Tensors(found, optimizer)))

    def _models(self) -> dict[str, Any]:
        return {**self._groups.members("own"), **self._groups.members("models")}

    def _tensors(self, optimizer: Optimizer) -> Tensors:
        return Tensors(self._models(), optimizer)

    def held(self) -> str:
        """Return a digest of the stages of all tensors; empty without pipelines."""
        return "" if self._pipeline is None else str(self._pipeline.held())

    def without_absent(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by name without those of other stages."""
        absent = {
            f"{title}.{path}"
            for title, model in modules_of(self._models()).items()
            for path, item in model.state_dict(keep_vars=True).items()
            if isinstance(item, torch.Tensor) and item.is_meta
        }
        return {name: item for name, item in found.items() if name not in absent}


def _momentum(period: Period, tensors: Tensors) -> torch.Tensor | None:
    """Return the outer momentum as a vector, with zeros for parameters that were not trained before."""
    if period.momentum is None:
        return None
    zeros = {name: torch.zeros_like(item) for name, item in tensors.params.items() if name not in period.momentum}
    return tensors.trained.join(period.momentum | zeros)


class Common:
    """What the replicas have in common besides their weights, as a part of checkpoints: tensors of all stages."""

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def state_dict(self) -> dict[str, Any]:
        periods = self._averages.periods
        return {name: {"rounds": item.rounds, "momentum": item.momentum} for name, item in periods.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, item in state.items():
            momentum = None if item["momentum"] is None else self._averages.without_absent(item["momentum"])
            self._averages.periods[name] = Period(rounds=item["rounds"], momentum=momentum)


class Own:
    """The states of a worker's optimizers, as a part of checkpoints. Those of rank 0 are in the checkpoint anyway."""

    per_worker = True

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def state_dict(self) -> dict[str, Any]:
        made = self._averages
        writes = made._topology.writes
        states = {} if writes else {name: item.state_dict()["state"] for name, item in made.optimizers().items()}
        return {"optimizers": states | made.states, "held": made.held()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["held"] == self._averages.held():
            self._averages.states = dict(state["optimizers"])  # the loop may still load those of rank 0
            return
        self._averages._session.reporter.notice(
            "replicas  continue with the optimizer states of the first one: their models are cut differently now"
        )


def _mean_of(difference: torch.Tensor, exact: int, traffic: str | None, group: Any) -> tuple[torch.Tensor, int]:
    """Return the mean of a vector over a process group, and the bytes that this worker has sent.

    The last `exact` values, those of buffers, are never rounded: running variances may exceed the range of float16.
    """
    if traffic is None:
        dist.all_reduce(difference, group=group)
        return difference / group.size(), difference.nbytes
    size = len(difference) - exact
    half, rest = (difference[:size] / group.size()).to(torch.float16), difference[size:] / group.size()
    dist.all_reduce(half, group=group)
    dist.all_reduce(rest, group=group)
    return torch.cat([half.to(difference.dtype), rest]), half.nbytes + rest.nbytes
