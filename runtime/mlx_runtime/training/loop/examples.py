"""Example rows of a run, from which predictors and exports of an experiment with `predict` know its inputs."""

import io
from typing import Any

import torch

from mlx_runtime.data import Batch
from mlx_runtime.runs import RunFolder
from mlx_runtime.storage import storage_at

EXAMPLES = "examples.pt"
ROWS, BATCHES = 3, 8
LARGEST_BYTES = 16 << 20
"""Size of the file, above which examples are not stored."""


class ExampleRecorder:
    """Stores the first rows of each pass by its name, and the shapes of rows in its first batches.

    The file holds `{stage: {"rows": {column: tensor (3, ...) or list}, "shapes": {column: [shape of a row, ...]}}}`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._stages: dict[str, dict[str, Any]] = {}
        self._batches: dict[str, int] = {}

    def on_batch_start(self, experiment: Any, stage: str, batch: Batch) -> None:
        count = self._batches[stage] = self._batches.get(stage, 0) + 1
        if count > BATCHES:
            return
        found = self._stages.setdefault(stage, {"rows": first_rows(batch), "shapes": {}})
        before = {name: list(shapes) for name, shapes in found["shapes"].items()}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                known, shape = found["shapes"].setdefault(name, []), list(value.shape[1:])
                known += [shape] * (shape not in known)
        if found["shapes"] != before:
            self._store()

    def _store(self) -> None:
        content = io.BytesIO()
        torch.save(self._stages, content)
        if len(content.getbuffer()) <= LARGEST_BYTES:
            storage_at(self._folder.location).write(content.getvalue(), EXAMPLES)


def first_rows(batch: Batch) -> dict[str, Any]:
    """Return copies of the first rows of a batch on the CPU: tensors, and lists of strings."""
    kept: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            kept[name] = value[:ROWS].detach().to("cpu", copy=True)
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            kept[name] = value[:ROWS]
    return kept
