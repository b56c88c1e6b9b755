"""Adapters of peft, merged into the weights of their models before an export is traced."""

from dataclasses import replace

import torch
from torch import nn

from mlx_runtime.companions.serving.exports.faults import ExportError
from mlx_runtime.errors import short_message
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.optimization import prepare_models
from mlx_runtime.runs.checkpoints.groups import members


def merge_adapters(experiment: BaseModule) -> list[str]:
    """Replace the models with adapters, and such parts of models, by merged ones. Return their paths.

    Raises:
        ExportError: adapters of this kind cannot be merged.
    """
    merged: list[str] = []
    for name, model in members(experiment.models, nn.Module).items():
        for path, part in [*model.named_modules(prefix=name)]:
            if not hasattr(part, "merge_and_unload") or any(path.startswith(f"{other}.") for other in merged):
                continue
            try:
                plain = part.merge_and_unload().eval().requires_grad_(False)
            except (NotImplementedError, ValueError) as error:
                raise ExportError(
                    f"the adapters of models.{path} cannot be merged: {short_message(error)}; --format safetensors "
                    "exports the weights as they are"
                ) from error
            owner, _, attribute = path.rpartition(".")
            if not owner:
                setattr(experiment.models, name, plain)
                prepare_models([plain], replace(experiment.cfg, compile=False), torch.device("cpu"))
            else:
                setattr(model.get_submodule(owner.partition(".")[2]), attribute, plain)
            merged.append(path)
    return merged
