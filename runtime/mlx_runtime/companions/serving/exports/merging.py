"""Adapters of peft, merged into the weights of their models before an export is traced."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from mlx_runtime.companions.serving.exports.faults import ExportError
from mlx_runtime.companions.serving.exports.programs import Program
from mlx_runtime.errors import short_message
from mlx_runtime.loop.experiment import BaseModule


def merge_adapters(experiment: BaseModule) -> list[str]:
    """Merge adapters into the weights below them, in place, so that `predict` finds its modules. Return their paths.

    Raises:
        ExportError: adapters of this kind cannot be merged.
    """
    merged: list[str] = []
    for path, part in Program(experiment).get_submodule("models").named_modules():
        if hasattr(part, "merge_adapter") and not any(path.startswith(f"{other}.") for other in merged):
            try:
                part.merge_adapter()
            except (NotImplementedError, ValueError) as error:
                raise ExportError(
                    f"the adapters of models.{path} cannot be merged: {short_message(error)}; --format safetensors "
                    "exports the weights as they are"
                ) from error
            merged.append(path)
    return merged


def weights_of(experiment: BaseModule, merged: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the weights of all models, named `model.parameter`, without the adapters at paths that were merged."""
    models = Program(experiment).get_submodule("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that they are already merged
        for path in merged:
            adapted: Any = models.get_submodule(path)
            models.set_submodule(path, adapted.merge_and_unload())
    return models.state_dict()
