"""Construction of Flax NNX objects, whose initial values come from `cfg.seed` and their place in the config."""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import torch
from flax import nnx


def make(target: Callable[..., Any], key: str, /, *args: Any, **kwargs: Any) -> Any:
    """Construct the object of the node at `key`. Its random streams are independent of those of all other nodes.

    Workers have the same seed while they build models, so that all of them construct the same object.
    """
    known = inspect.signature(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    given = known.bind_partial(*[None] * isinstance(target, type), *args, **kwargs).arguments
    rngs = known.parameters.get("rngs")
    if rngs is not None and rngs.kind is not rngs.VAR_KEYWORD and "rngs" not in given:
        seed = jax.random.key(torch.initial_seed() % 2**32)
        kwargs["rngs"] = nnx.Rngs(jax.random.fold_in(seed, zlib.crc32(key.encode())))
    mesh = jax.sharding.get_abstract_mesh()
    try:
        with nnx.use_eager_sharding(not mesh.empty):  # outside of runs, there is no mesh
            return target(*args, **kwargs)
    except ValueError as error:
        if "not found in mesh" not in str(error):  # an axis of `nnx.with_partitioning`
            raise
        raise ValueError(f"{str(error).rstrip('.')}; add this axis to cfg.mesh") from error
