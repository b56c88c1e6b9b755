"""Where numbers go: TensorBoard and `metrics.jsonl` in the run folder. Only rank 0 writes."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from mlx_runtime.errors import StorageError
from mlx_runtime.layout import RunFolder


class Tracker:
    """Writes one line of `metrics.jsonl` and the same scalars to TensorBoard per report.

    Args:
        folder: of the run.
        ours: whether this run has not been taken over by another driver.
    """

    def __init__(self, folder: RunFolder, ours: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._ours = folder, ours
        self._lines = folder.metrics.open("a", encoding="utf-8", buffering=1)  # a complete line is on disk
        self._purge_step: int | None = None

    @cached_property
    def _writer(self) -> SummaryWriter:
        return SummaryWriter(str(self._folder.path), purge_step=self._purge_step)

    def write(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record scalars.

        Args:
            values: like `{"train/loss": 0.3}`.
            step: global step, the x axis in TensorBoard.
            epoch: as user code counts them.
        """
        line: dict[str, Any] = {"step": step, "epoch": epoch, "timestamp": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._lines.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._lines.flush()
        self._writer.flush()

    def push(self, *, must: bool = False) -> None:
        """Copy what is flushed to where the run is stored.

        Args:
            must: a failure is an error, not made good for by the next time.

        Raises:
            StorageError: the storage does not take it.
        """
        self._folder.push(*self._files(), must=must)

    def sizes(self) -> dict[str, int]:
        """How long each file is at present, in bytes: a checkpoint remembers it."""
        self.flush()
        return {file.name: file.stat().st_size for file in self._files()}

    def rewind(self, sizes: Mapping[str, int], step: int) -> None:
        """Take back what was written after a checkpoint, so that no step is recorded twice.

        Args:
            sizes: of the files then.
            step: global step then; later ones are also hidden in a TensorBoard that has read them already.
        """
        self.__dict__.pop("_writer", None)
        self._purge_step = step + 1 if sizes else None
        for file in self._files():
            if file.name in sizes or file == self._folder.metrics:
                os.truncate(file, min(sizes.get(file.name, 0), file.stat().st_size))
            else:
                file.unlink()
                self._folder.forget(file)

    def _files(self) -> list[Path]:
        return [self._folder.metrics, *sorted(self._folder.path.glob("events.out.tfevents.*"))]

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if "_writer" in self.__dict__:
            self._writer.close()
        with contextlib.suppress(StorageError):
            if self._folder.uri is not None and self._ours():
                self.push()
