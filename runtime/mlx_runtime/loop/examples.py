"""Example rows of a run, from which predictors and exports of an experiment with `predict` know its inputs."""

import contextlib
import io
from typing import Any

import torch
from torch import nn

from mlx_runtime import companions
from mlx_runtime.data.batches import Batch, move_tensors
from mlx_runtime.distributed.wrapping import unwrap
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import storage_at

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
        shapes = {name: list(value.shape[1:]) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        new = {name: shape for name, shape in shapes.items() if shape not in found["shapes"].setdefault(name, [])}
        for name, shape in new.items():
            found["shapes"][name].append(shape)
        if new:
            self._store()

    def problem(self, experiment: Any, device: torch.device) -> str:
        """Return a warning if `predict` fails on the examples. Called by one worker, at the end of a run."""
        for name, module in members(experiment.models, nn.Module).items():
            setattr(experiment.models, name, unwrap(module).eval())  # as a predictor finds it
        with torch.no_grad(), contextlib.suppress(*USER_ERRORS):
            for found in self._stages.values():
                experiment._answer(move_tensors(found["rows"], lambda item: item.to(device)))
            return ""
        return str(companions.part("serving.loading").problem_of_predict(experiment, self._stages, device))

    def _store(self) -> None:
        content = io.BytesIO()
        torch.save(self._stages, content)
        if len(content.getbuffer()) <= LARGEST_BYTES:
            storage_at(self._folder.location).write(content.getvalue(), EXAMPLES)


def first_rows(batch: Batch) -> Batch:
    """Return copies of the first rows of a batch on the CPU: tensors, and lists of strings."""
    kept = {
        name: value[:ROWS]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }
    return move_tensors(kept, lambda item: item.detach().to("cpu", copy=True))
