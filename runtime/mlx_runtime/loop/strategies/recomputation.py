"""Activation checkpointing: recomputation of the activations of blocks in the backward pass."""

from collections.abc import Mapping

from torch import nn

from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.forward import recompute
from mlx_runtime.loop.strategies.blocks import near_matches, select_modules


def recompute_blocks(models: Mapping[str, nn.Module], blocks: Mapping[str, list[str]], wanted: bool | str) -> None:
    """Recompute the activations of the blocks of each model, or of the modules that a pattern selects.

    Raises:
        ConfigError: there is no such block or module.
    """
    if not wanted:
        return
    if isinstance(wanted, str):
        blocks = {name: select_modules(model, wanted) for name, model in models.items()}
    if not any(blocks.values()):
        if not isinstance(wanted, str):
            cure = "name them with a pattern, like 'encoder.*'"
            raise ConfigError(f"cfg.activation_checkpointing is true, but no model has blocks that repeat; {cure}")
        paths = [path for model in models.values() for path, _ in model.named_modules() if path]
        raise ConfigError(f"cfg.activation_checkpointing: {wanted!r} matches no module.{near_matches(wanted, paths)}")
    for name, paths in blocks.items():
        for module in {id(item): item for item in map(models[name].get_submodule, paths)}.values():
            recompute(module)
