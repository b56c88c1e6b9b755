"""Where numbers go: TensorBoard and `metrics.jsonl` in the run folder. Only rank 0 writes."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes one line of `metrics.jsonl` and the same scalars to TensorBoard per report.

    Args:
        folder: the run folder.
        path: of the JSON lines, appended to.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._writer = SummaryWriter(str(folder))
        self._lines = path.open("a", encoding="utf-8", buffering=1)  # a line is on disk when it is complete

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

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._writer.close()
