"""Sessions without workers, Ray or a process group."""

from pathlib import Path
from typing import Any

import torch

from mlx_runtime import BaseModule
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.training.context import RunContext
from mlx_runtime.training.session import Session

ALONE = Topology(0, 1, torch.device("cpu"))


class Events(list):
    """A sink that keeps events."""

    def send(self, event: Any) -> None:
        self.append(event)


def attach(module: BaseModule, folder: Path, **options: Any) -> Session:
    """Give an experiment a session of its own, as a worker does before its loop runs."""
    module._run = Session(RunContext(RunFolder(folder), ALONE, module.cfg), module, **options)
    return module._run
