"""Experiments whose models, updates and devices are JAX's: `JaxModule`, and the settings of their runs."""

from mlx_runtime.extras import require

for library in ("jax", "flax", "optax"):
    require(library, "an experiment in JAX")

from mlx_runtime.companions.jax.batches import Batches  # noqa: E402
from mlx_runtime.companions.jax.module import JaxModule  # noqa: E402
from mlx_runtime.companions.jax.options import TrainConfig  # noqa: E402

__all__ = ["Batches", "JaxModule", "TrainConfig"]
