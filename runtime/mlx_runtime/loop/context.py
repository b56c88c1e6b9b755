"""The state that the parts of a session share: the run, its progress, and the objects of the experiment."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mlx_runtime.data.loaders import Loader
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.wrapping import is_sharded, unwrap
from mlx_runtime.runs.checkpoints.groups import members, stateful
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder

GROUPS = ("cfg", "datasets", "models", "optimizers", "losses", "metrics", "tools")
"""The groups of objects in an experiment, by their names in conf.yaml."""


class Groups:
    """The objects of an experiment, by group. User code may replace them at any time."""

    def __init__(self, experiment: Any) -> None:
        self.experiment = experiment

    def __getitem__(self, name: str) -> Any:
        """Return a group. `own` contains the objects with a state that user code assigned to the experiment itself.

        `per_worker` contains those objects and tools whose attribute `per_worker` is True, like `tools.hidden`.
        """
        if name == "own":
            return SimpleNamespace(**self._own())
        if name == "per_worker":
            found = {f"tools.{item}": value for item, value in self.members("tools").items()} | self._own()
            return SimpleNamespace(**{item: value for item, value in found.items() if is_per_worker(value)})
        return getattr(self.experiment, name, None)  # the experiment's own __init__ may set fewer groups

    def members(self, name: str) -> dict[str, Any]:
        """Return the objects of a group by name."""
        return members(self[name])

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return members(self["optimizers"], Optimizer)

    @property
    def modules(self) -> list[nn.Module]:
        return list(members(self["models"], nn.Module).values())

    @property
    def shared(self) -> dict[str, Any]:
        """The tools and the objects on the experiment that are equal on all workers, by name, like `tools.ema`.

        Objects of the runtime, such as the arguments of `save_checkpoint`, may differ: those of rank 0 are saved.
        """
        found = {f"tools.{name}": item for name, item in self.members("tools").items()} | self.members("own")
        own = {name: item for name, item in found.items() if not is_per_worker(item)}
        return {name: item for name, item in own.items() if not type(item).__module__.startswith("mlx_runtime.")}

    @property
    def shared_modules(self) -> dict[str, nn.Module]:
        """The modules among them, and those in their attributes, without models."""
        models = {id(part) for model in self.modules for part in (model, unwrap(model))}
        found: dict[str, Any] = {}
        for name, item in self.shared.items():
            parts = {"": item} if isinstance(item, nn.Module) else getattr(item, "__dict__", {})
            found |= {f"{name}.{key}": part for key, part in parts.items() if id(part) not in models}
        return {name: item for name, item in found.items() if isinstance(item, nn.Module) and not is_sharded(item)}

    def _own(self) -> dict[str, Any]:
        grouped = {id(item) for group in GROUPS for item in self.members(group).values()}
        grouped |= {id(unwrap(item)) for item in self.members("models").values()}
        own = {
            name: stateful(item, self.experiment, name)
            for name, item in vars(self.experiment).items()
            if name not in GROUPS and not isinstance(item, Loader | type) and id(item) not in grouped
        }
        return {
            name: item for name, item in own.items() if hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
        }


def is_per_worker(item: Any) -> bool:
    """Return True if each worker has its own state of an object, like the hidden state of the rows that it reads."""
    return getattr(item, "per_worker", False) is True


@dataclass
class Progress:
    """The progress of a run."""

    epoch: int = 0  # counted from 0
    epochs: int | None = None  # expected in total; None means `cfg.num_epochs`; 0 in an evaluation
    global_step: int = 0  # training steps taken in all epochs; steps that make one update together count once
    interrupted: bool = False  # restarted within an epoch; its training pass has not resumed yet


@dataclass(frozen=True)
class RunContext:
    """The run, as seen by a worker."""

    folder: RunFolder
    topology: Topology
    cfg: Any
    groups: Groups
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved conf.yaml of the run
    shown_config: Mapping[str, Any] = field(default_factory=dict)  # the same without secrets
    evaluates: bool = False  # evaluate a checkpoint, without training
    preempted: Callable[[], bool] | None = None  # see `Cluster`
    shares_storage: bool = True  # see `Cluster`
    progress: Progress = field(default_factory=Progress)

    @property
    def steps_left(self) -> int | None:
        """Training steps until `cfg.max_steps`; None without a limit."""
        limit = None if self.evaluates else self.cfg.max_steps
        return None if limit is None else max(0, limit - self.progress.global_step)

    def plan_epochs(self, epoch: int, steps: int, steps_per_epoch: int) -> None:
        """Estimate the number of epochs until `cfg.max_steps`, as an epoch with `steps` steps left begins."""
        if self.steps_left is not None:
            more = max(0, math.ceil((self.steps_left - steps) / steps_per_epoch))
            self.progress.epochs = min(self.cfg.num_epochs, epoch + 1 + more)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.folder.checkpoints)


def params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
