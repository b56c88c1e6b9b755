"""Settings of experiments in JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import mlx_runtime.loop.options as options
from mlx_runtime.sections import Elastic, Fragments, Replicas, Sharding


@dataclass
class TrainConfig(options.TrainConfig):
    """Settings of a run in JAX: those of every run, without `REFUSED`, and the mesh of its devices.

    Attributes:
        strategy: `jax`: all workers together train one model on the devices of all.
        mesh: number of devices along each axis of the mesh; one may be -1, for all that are left. Batches are sharded
            along `data`; parameters are replicated, unless the model shards them along other axes, with
            `nnx.with_partitioning` or `jax.lax.with_sharding_constraint`.
    """

    strategy: str = "jax"
    mesh: dict[str, int] = field(default_factory=lambda: {"data": -1}, metadata={"resumable": True})


REFUSED: dict[str, tuple[Any, str]] = {
    "precision": (32, "give the layers dtype=jnp.bfloat16"),
    "accumulate_grad_batches": (1, "wrap the optimizer in optax.MultiSteps"),
    "gradient_clip": (None, "put optax.clip_by_global_norm before the optimizer, with optax.chain"),
    "compile": (False, "write nnx.jit in the loop"),
    "activation_checkpointing": (False, "write nnx.remat in the model"),
    "deterministic": (False, "set XLA_FLAGS=--xla_gpu_deterministic_ops=true"),
    "elastic.keep_global_batch": (Elastic().keep_global_batch, "wrap the optimizer in optax.MultiSteps"),
    "fragments": (Fragments(), "shard the model along an axis of cfg.mesh"),
    "replicas": (Replicas(), "average the parameters in the loop"),
    "tuning": (None, "choose what trains with nnx.Optimizer(wrt=...) and optax.partition"),
    "sharding": (Sharding(), "shard the model along an axis of cfg.mesh"),
}
"""Settings for torch, with their defaults and what JAX has instead."""


def problem(cfg: Any) -> str | None:
    """Return the reason why JAX cannot train with these settings, or None."""
    mesh = getattr(cfg, "mesh", None)
    if mesh is None:
        return "it has no mesh; let TrainConfig inherit from mlx_runtime.jax.TrainConfig, and Experiment from JaxModule"
    for name, (default, cure) in REFUSED.items():
        if attrgetter(name)(cfg) != default:
            return f"cfg.{name} is for torch; {cure}, and leave out cfg.{name}"
    sizes = [*mesh.values()] if isinstance(mesh, Mapping) else []
    if not sizes or any(type(size) is not int or (size < 1 and size != -1) for size in sizes) or sizes.count(-1) > 1:
        return f"cfg.mesh is {mesh!r:.80}; write devices per axis, like {{data: -1, model: 2}}; one -1 means the rest"
    return None
