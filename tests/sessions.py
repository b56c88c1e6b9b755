"""Sessions without workers, Ray or a process group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import Dataset

from mlx_runtime import BaseModule
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.context import Groups, RunContext
from mlx_runtime.loop.experiment import attach as attach_session
from mlx_runtime.loop.job import Direct
from mlx_runtime.loop.session import Session
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.folder import RunFolder

ALONE = Topology(0, 1, torch.device("cpu"))


class Rows(Dataset):
    """Rows with one number each, which counts them."""

    def __init__(self, rows: int, first: float = 0.0, batch_size: int = 2) -> None:
        self.rows, self.first, self.batch_size = rows, first, batch_size

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.first + index])

    @staticmethod
    def ray_map_batches(batch: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(batch["item"])}


class Events(list):
    """A sink that keeps events."""

    def send(self, event: Any) -> None:
        self.append(event)


_sessions: WeakKeyDictionary[BaseModule, Session] = WeakKeyDictionary()


def attach(
    module: BaseModule,
    folder: Path,
    sink: Events | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    topology: Topology = ALONE,
    strategy: DDP | None = None,
) -> Session:
    """Give an experiment a session of its own, as a worker does before its loop runs."""
    context = RunContext(RunFolder(folder), topology, module.cfg, Groups(module))
    events = sink if sink is not None else Events()
    strategy = strategy or DDP(module.cfg, topology)
    _sessions[module] = Session(context, strategy, Direct(events.send, stop_requested))
    attach_session(module, _sessions[module])
    return _sessions[module]


def session_of(module: BaseModule) -> Session:
    """Return the session that an experiment is attached to."""
    return _sessions[module]
