"""Replicas of the models that train on their own, and are averaged every `cfg.replicas.every` updates.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767) adopts the mean of the replicas'
weights. DiLoCo (Douillard et al., arXiv 2311.08105) makes the difference between the last common weights and that mean
the gradient of an outer optimizer, SGD with Nesterov momentum; `lr=1, momentum=0` is local SGD.

A replica is a worker, or the workers that share one model. With `cfg.replicas.meet`, it is a whole run, whose workers
average their gradients as ever; see `meeting`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mlx_runtime import companions
from mlx_runtime.companions.fragments.averaging import Tensors, modules_of, outer_step, saved_tensors
from mlx_runtime.companions.fragments.traffic import HOOKED, Compressor, compressed_gradients
from mlx_runtime.companions.sharding.aliasing import raw
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import broadcast_tensors
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.importing import after_import
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.storage.files import storage_root

if TYPE_CHECKING:
    from mlx_runtime.companions.fragments.meeting import Meeting
    from mlx_runtime.loop.job import Job


_STARTS_OVER = (
    "replicas  continue with the weights and optimizer states of the first one, without what compression has left out: "
    "their models are cut differently now"
)

ANSWER_S = 10.0
"""Interval at which rank 0 tells the other workers that it still waits for other replicas."""


def problems(cfg: Any) -> list[str]:
    """Return one line per setting that contradicts `cfg.replicas`."""
    found, wanted, strategy = [], cfg.replicas, cfg.strategy
    if wanted.every is None:
        for name, default in (("lr", 1.0), ("momentum", 0.0), ("meet", None)):
            if (value := getattr(wanted, name)) != default:
                found.append(f"cfg.replicas.{name}={value} needs cfg.replicas.every, the updates between two averages")
        if wanted.traffic is not None and strategy != "ddp":
            found.append(f"cfg.replicas.traffic={wanted.traffic} without cfg.replicas.every is for cfg.strategy=ddp")
        elif wanted.traffic is not None and wanted.traffic not in HOOKED:
            text = f"torch compresses the gradients of every step as {' or '.join(HOOKED)}"
            found.append(f"cfg.replicas.traffic={wanted.traffic} needs cfg.replicas.every; {text}")
        return found
    if strategy in ("fsdp", "hsdp") or (strategy == "pipeline" and wanted.meet is not None):
        text = "cfg.strategy=ddp" + (" or pipeline" if wanted.meet is None else "")
        found.append(f"cfg.replicas.every={wanted.every} is for {text}; cfg.strategy is {strategy}")
    if not 0 <= wanted.momentum < 1:
        found.append(f"cfg.replicas.momentum is {wanted.momentum}, not from 0 to below 1")
    if cfg.precision == "fp16" and wanted.meet is None:
        found.append("cfg.precision=fp16 may skip an update on one replica, and others would wait forever; use bf16")
    if wanted.meet is not None:
        if wanted.traffic == "powersgd":
            found.append(
                "cfg.replicas.traffic=powersgd has products that differ between processors; meet with fp16 or topk"
            )
        try:
            storage_root(wanted.meet)
        except ConfigError as error:
            found.append(str(error).replace("cfg.storage_path", "cfg.replicas.meet"))
    return found


def topology_of(cfg: Any, topology: Topology) -> Topology:
    """Return the position of a worker whose models `prepare_model` does not wrap as usual."""
    if cfg.replicas.every is not None and cfg.replicas.meet is not None:
        return topology  # the workers of one replica
    after_import("ray.train", lambda: companions.part("ray.private").keep_sharded_models())
    make = EqualAtFirst() if cfg.replicas.every is not None else compressed_gradients(cfg.replicas.traffic)
    return replace(topology, replicate=make)


class EqualAtFirst:
    """Gives all workers the weights of rank 0, as DDP does, unless each has restored its own. Gradients stay local."""

    def __init__(self) -> None:
        self.restored = False
        self.prepared: list[nn.Module] = []

    def __call__(self, model: nn.Module, **options: Any) -> nn.Module:
        self.prepared.append(model)
        if not self.restored:
            broadcast_tensors([item.data for item in (*model.parameters(), *model.buffers())])
        return model


@contextlib.contextmanager
def averages(session: Any, job: "Job", sink: Any) -> Iterator[None]:
    """Average the replicas of a run while the block runs. Every worker must enter it."""
    context, notice = session.context, session.reporter.notice
    wanted, topology = context.cfg.replicas, context.topology
    meeting: Meeting | None = None
    with contextlib.ExitStack() as stack:
        if wanted.meet is not None:
            if topology.writes:
                from mlx_runtime.companions.fragments.meeting import enter

                meeting = stack.enter_context(enter(session, job, sink))
        elif topology.data_parallel_size == 1:
            notice("without other replicas, cfg.replicas.every has no effect")
            yield
            return
        else:
            session.replicated = False
            each = "worker" if topology.model_parallel_size == 1 else f"{topology.model_parallel_size} workers"
            notice(f"replicas  {topology.data_parallel_size}, one per {each}, averaged every {wanted.every} updates")
        made = Averages(session, meeting)
        experiment = context.groups.experiment
        experiment.replicas_common = made.common
        if wanted.meet is None:
            experiment.replicas_own = made.own
        stack.callback(register_optimizer_step_pre_hook(made.before_update).remove)
        stack.callback(register_optimizer_step_post_hook(made.after_update).remove)
        yield


@dataclass
class Period:
    """The updates of one optimizer since the last average."""

    steps: int = 0  # since the beginning of the run
    rounds: int = 0  # averages taken
    common: dict[str, torch.Tensor] | None = None  # at the last average; None until the first update after it
    momentum: dict[str, torch.Tensor] | None = None  # of the outer optimizer
    compressors: list[Compressor] = field(default_factory=list)  # by group of workers that hold the same tensors
    traffic: Sequence[Mapping[str, Any]] | None = None  # restored states of the compressors
    waits: bool = False  # this replica has published its part of an average, but left before the average was taken


class Averages:
    """Averages the models of each optimizer after every `cfg.replicas.every` of its updates.

    Every worker calls the hooks at the same updates. `meeting` is that of rank 0, if the replicas are runs.
    """

    def __init__(self, session: Any, meeting: "Meeting | None") -> None:
        self._session, self._meeting = session, meeting
        self._groups, self._topology = session.context.groups, session.context.topology
        self._wanted = session.context.cfg.replicas
        self._meets = self._wanted.meet is not None
        self._joined = not self._meets
        alone = self._topology.model_parallel_size == 1
        self._pipeline = None if alone else session.optimization.strategy
        self._names: dict[
            int, tuple[str | None, Optimizer]
        ] = {}  # by id; the optimizer is kept, so that ids stay unique
        self.held = "" if self._pipeline is None else self._pipeline.held()
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
        if self._meets and (not self._joined or name not in self.periods):
            self._check_alone(optimizer)
        period = self.periods.setdefault(name, Period())
        if self._joined and not period.waits and period.common is not None:
            return
        tensors = self._tensors(optimizer)
        now = tensors.vector()
        if period.common is None:
            period.common = tensors.split(now)
        elif missing := tensors.all.keys() - period.common.keys():
            raise ConfigError(f"the common weights in the checkpoint lack {', '.join(sorted(missing)):.300}")
        if not self._joined:
            self._join(period, tensors)
        if period.waits:
            self._meet(period, tensors)
        if self._meets and not torch.equal(now, tensors.vector()):  # the gradients are those of other weights
            for item in tensors.params.values():
                item.grad = None

    def after_update(self, optimizer: Optimizer, *_: object) -> None:
        """Count an update, and average the models if it ends a period."""
        name = self._name_of(optimizer)
        if name is None:
            return
        period = self.periods[name]
        period.steps += 1
        if period.steps % self._wanted.every:
            return
        tensors = self._tensors(optimizer)
        assert period.common is not None
        difference = tensors.difference(tensors.join(period.common))
        if not self._meets:
            mean, sent = self._mean(period, tensors, difference)
            self._adopt(period, tensors, mean)
            if self._pipeline is not None and (each := gather(sent)) is not None:
                sent = sum(each[rank] for rank in self._topology.replicas[0])
            self._record({"bytes": sent, "averaged": self._topology.data_parallel_size, "round": period.rounds})
            return
        [compressor] = self._compressors(period, [tensors])
        if self._meeting is not None:
            payload = compressor.compress(difference.cpu())
            self._meeting.publish(payload, compressor.kind, self._wanted.every)
        period.waits = True
        self._meet(period, tensors)

    def _adopt(self, period: Period, tensors: Tensors, mean: torch.Tensor) -> None:
        assert period.common is not None
        common, momentum = tensors.join(period.common), _momentum(period, tensors)
        common, momentum = outer_step(
            common, momentum, mean.to(common), tensors.exact, self._wanted.lr, self._wanted.momentum
        )
        period.momentum = None if momentum is None else tensors.trained.split(momentum)
        tensors.fill(common)
        period.common = None
        period.rounds += 1

    # -- exchanges

    def _mean(self, period: Period, tensors: Tensors, difference: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the mean of the replicas' differences, and the bytes that this worker has sent."""
        if self._pipeline is None:
            [compressor] = self._compressors(period, [tensors])
            return _mean_of(compressor, difference, None)
        groups = self._pipeline.peers_of(modules_of(self._models()), tensors.all)
        parts = [tensors.only(names) for _, names in groups]
        pieces, sent = tensors.split(difference.cpu()), 0
        for part, (group, _), compressor in zip(parts, groups, self._compressors(period, parts), strict=True):
            own = torch.cat([pieces[name] for name in part.all]).to(part.dtype)
            mean, count = _mean_of(compressor, own, group)
            pieces |= part.split(mean.to(difference.dtype))
            sent += count
        return tensors.join(pieces), sent

    def _check_alone(self, optimizer: Optimizer) -> None:
        if any(item is not optimizer and len(self._tensors(item)) for item in self.optimizers().values()):
            raise ConfigError("cfg.replicas.meet averages the models of one optimizer; this experiment has several")

    def _join(self, period: Period, tensors: Tensors) -> None:
        """Join the meeting, and adopt its common weights unless this replica is up to date."""
        self._joined = True
        if self._meeting is not None:
            assert period.common is not None
            momentum = _momentum(period, tensors)
            momentum = None if momentum is None else momentum.cpu()
            self._meeting.join(tensors, tensors.join(period.common).cpu(), momentum, period.rounds)
        self._take(period, tensors)

    def _meet(self, period: Period, tensors: Tensors) -> None:
        """Wait for the average of the round. If the run is asked to stop, wait again after it is resumed."""
        done = None
        while done is None:  # the other workers of this replica must not wait too long in one collective
            done = broadcast(self._meeting.wait(ANSWER_S) if self._meeting is not None else None)
            self._session.beat()
        if not done:
            return
        self._take(period, tensors)
        self._record({} if self._meeting is None else self._meeting.numbers)

    def _take(self, period: Period, tensors: Tensors) -> None:
        """Take the position of the meeting on rank 0, on all workers of this replica."""
        meeting = self._meeting
        fields = None
        if meeting is not None:
            fields = {"moved": meeting.moved, "rounds": meeting.rounds, "has_momentum": meeting.momentum is not None}
        fields = broadcast(fields)
        if not fields["moved"]:
            return
        now = tensors.vector()
        common = torch.empty_like(now) if meeting is None or meeting.common is None else meeting.common.to(now)
        size = len(now) - tensors.exact
        momentum = None
        if fields["has_momentum"]:
            source = None if meeting is None else meeting.momentum
            momentum = now.new_empty(size) if source is None else source.to(now)
        if self._topology.world_size > 1:
            broadcast_tensors([common, *([] if momentum is None else [momentum])])
        tensors.fill(common)
        period.steps -= period.steps % self._wanted.every
        period.momentum = None if momentum is None else tensors.trained.split(momentum)
        period.rounds, period.waits = fields["rounds"], False
        period.common = tensors.split(tensors.vector())

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

    def _compressors(self, period: Period, parts: Sequence[Tensors]) -> list[Compressor]:
        if not period.compressors:
            period.compressors = [part.compressor(self._wanted.traffic) for part in parts]
            for compressor, state in zip(period.compressors, period.traffic or (), strict=False):
                compressor.load_state_dict(state)
        return period.compressors

    def is_between(self, name: str) -> bool:
        """Return True if an optimizer is in the middle of a period, so that the weights of replicas differ."""
        period = self.periods.get(name)
        return period is not None and (period.steps % self._wanted.every != 0 or period.waits)

    def restored(self) -> None:
        """Keep the restored weights of this worker."""
        make = self._topology.replicate
        if isinstance(make, EqualAtFirst):
            make.restored = True

    def live(self) -> dict[str, torch.Tensor]:
        """Return the parameters and saved buffers of all models, by name."""
        return saved_tensors(self._models())

    def live_buffers(self) -> dict[str, torch.Tensor]:
        return saved_tensors(self._models(), buffers=True)

    def held_of(self, found: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """Return tensors by name without those of other stages."""
        if found is None or self._pipeline is None:
            return None if found is None else dict(found)
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
    """What the replicas have in common, as a part of checkpoints, with the tensors of all stages by name."""

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def state_dict(self) -> dict[str, Any]:
        made = self._averages
        return {
            name: {
                "steps": item.steps,
                "rounds": item.rounds,
                "waits": item.waits,
                "common": item.common if made.is_between(name) else None,  # otherwise, they are the weights
                "momentum": item.momentum,
                "traffic": _traffic_of(item) if made._meets else None,
            }
            for name, item in made.periods.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, item in state.items():
            held = {key: self._averages.held_of(item[key]) for key in ("common", "momentum")}
            self._averages.periods[name] = Period(**{**item, **held})


class Own:
    """What differs between the replicas of a run, as a part of checkpoints.

    Weights and states of optimizers are those of rank 0 anyway.
    """

    per_worker = True

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def state_dict(self) -> dict[str, Any]:
        made = self._averages
        traffic = {name: _traffic_of(item) for name, item in made.periods.items()}
        if made._topology.writes:
            return {"tensors": {}, "optimizers": {}, "traffic": traffic, "held": made.held}
        tensors = made.live_buffers()
        for name, item in made.optimizers().items():
            if made.is_between(name):
                tensors |= made._tensors(item).params
        states = {name: item.state_dict()["state"] for name, item in made.optimizers().items()} | made.states
        return {"tensors": tensors, "optimizers": states, "traffic": traffic, "held": made.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        made, live = self._averages, self._averages.live()
        if state.get("held", "") != made.held:
            made._session.reporter.notice(_STARTS_OVER)
            return
        made.restored()
        with torch.no_grad():
            for name, item in state["tensors"].items():
                live[name].copy_(item)
        made.states = dict(state["optimizers"])  # the loop may still load those of rank 0, when it adds objects
        for name, item in state["traffic"].items():
            made.periods.setdefault(name, Period()).traffic = item


def _traffic_of(period: Period) -> Sequence[Mapping[str, Any]] | None:
    return [item.state_dict() for item in period.compressors] if period.compressors else period.traffic


def _mean_of(compressor: Compressor, difference: torch.Tensor, group: Any) -> tuple[torch.Tensor, int]:
    """Return the mean of a vector over a process group, and the bytes that this worker has sent."""
    group = group or torch.distributed.group.WORLD
    size = group.size()
    payload = compressor.compress(difference)
    sent = sum(item.nbytes for item in payload.values())
    if compressor.kind is None:
        total = payload["values"]
        torch.distributed.all_reduce(total, group=group)
        return total / size, sent
    shapes = {name: (item.shape, item.dtype, item.nbytes) for name, item in payload.items()}
    packed = torch.cat([raw(item.contiguous()) for item in payload.values()])
    received = [torch.empty_like(packed) for _ in range(size)]
    torch.distributed.all_gather(received, packed, group=group)
    total = torch.zeros_like(difference)
    for item in received:
        parts = torch.split(item, [count for _, _, count in shapes.values()])
        found = {
            name: part.clone().view(dtype).reshape(shape)
            for part, (name, (shape, dtype, _)) in zip(parts, shapes.items(), strict=True)
        }
        total += compressor.expand(found)
    return total / size, sent
