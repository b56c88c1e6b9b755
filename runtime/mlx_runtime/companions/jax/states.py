"""States of JAX's objects in checkpoints: the arrays of a tree by their paths, as tensors."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mlx_runtime.companions.notebook.arrays import as_tensors
from mlx_runtime.distributed.wrapping import is_sharded, local_part
from mlx_runtime.errors import MlxError, short_message

LAYOUT = "mlx_runtime.layout"
"""Name of the mesh and the shardings in a state."""


class TreeState:
    """The state of a tree: arrays, keys of random numbers and numbers, by names like `layers.0.kernel`.

    Other values in it, such as functions, stay as they are.

    Args:
        name: That of the tree, for messages.
        read: Returns the tree.
        write: Replaces it with one of the same structure.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._name, self._read, self._write = name, read, write

    def state_dict(self) -> dict[str, Any]:
        """Return the values as copies. If workers have different parts of an array, each of them must call this.

        Raises:
            MlxError: a checkpoint cannot hold a value, or two have the same name.
        """
        leaves, _ = self._flatten()
        values = {name: _plain(leaf, f"{self._name}.{name}") for name, leaf in leaves if _is_value(leaf)}
        return values | ({LAYOUT: layout} if (layout := _layout(leaves)) else {})

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Load values, without `strict` only those of known names.

        Raises:
            ValueError: they do not fit the tree.
        """
        leaves, structure = self._flatten()
        layout = saved.get(LAYOUT, {})
        if not isinstance(layout, Mapping) or not all(isinstance(item, Mapping) for item in layout.values()):
            raise ValueError(f"{LAYOUT} is none")
        own, there = {name for name, leaf in leaves if _is_value(leaf)}, saved.keys() - {LAYOUT}
        if strict and (differing := sorted(own ^ there)):
            raise ValueError(f"{differing[0]} is only {'in the code' if differing[0] in own else 'there'}")
        made = [_restored(name, leaf, saved[name]) if name in own & there else leaf for name, leaf in leaves]
        made = [_laid_out(leaf, layout, name) for leaf, (name, _) in zip(made, leaves, strict=True)]
        self._write(jax.tree.unflatten(structure, made))

    def _flatten(self) -> tuple[list[tuple[str, Any]], Any]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._read())
        named: dict[str, Any] = {}
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            if name in named:
                raise MlxError(f"two values of {self._name} have the name {name} in a checkpoint; rename a key of them")
            named[name] = leaf
        return [*named.items()], structure


def adapter(item: Any, owner: Any, name: str) -> TreeState | None:
    """Return the state of an object of Flax NNX, or of an attribute that is a tree with arrays; see `stateful`."""
    if isinstance(item, nnx.Pytree):
        return TreeState(name, lambda: nnx.state(item), lambda state: nnx.update(item, state))
    if hasattr(item, "state_dict"):
        return None
    try:
        leaves = jax.tree.leaves(item)
    except Exception as error:  # also of classes that user code registers
        if _has_arrays(item):
            cure = "a tree has no cycles, and its dicts have keys of one type"
            raise MlxError(f"a checkpoint cannot hold the arrays of {name}: {short_message(error)}; {cure}") from error
        return None
    if not any(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    return TreeState(name, lambda: getattr(owner, name), lambda tree: setattr(owner, name, tree))


def _has_arrays(item: Any, outer: tuple[int, ...] = ()) -> bool:
    """Return True if there are arrays in containers, which need not be a tree."""
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    inner = id(item) not in outer and any(_has_arrays(part, (*outer, id(item))) for part in parts)
    return inner or isinstance(item, jax.Array)


def array_of(tensor: torch.Tensor) -> Any:
    """Return the array of a tensor on the CPU, with its type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _layout(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mesh, and the axes along which each array on it is sharded; nothing on a single device."""
    found = {name: leaf.sharding for name, leaf in leaves if isinstance(leaf, jax.Array)}
    found = {name: item for name, item in found.items() if isinstance(item, NamedSharding) and item.mesh.size > 1}
    if not found:
        return {}
    specs = {name: [*map(_listed, item.spec)] for name, item in found.items()}
    return {"mesh": dict(next(iter(found.values())).mesh.shape), "specs": specs}


def _listed(axes: Any) -> Any:
    return list(axes) if isinstance(axes, tuple) else axes


def _laid_out(leaf: Any, layout: Mapping[str, Any], name: str) -> Any:
    """Return an array with the sharding that it had when it was saved, if it is on an equal mesh.

    XLA may have sharded it further than the model did, and then sums in another order.
    """
    sharding = getattr(leaf, "sharding", None)
    if not layout or not isinstance(sharding, NamedSharding) or sharding.mesh.shape != layout["mesh"]:
        return leaf
    spec = [tuple(axes) if isinstance(axes, list) else axes for axes in layout["specs"].get(name, ())]
    return jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _is_value(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"  # objects, text and times
    return isinstance(leaf, jax.Array | bool | int | float | complex)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any, title: str) -> Any:
    if _is_key(leaf):
        return {"impl": str(jax.random.key_impl(leaf)), "key": _plain(jax.random.key_data(leaf), title)}
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return _sharded(leaf, title)
    return _tensor(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, title)


def _tensor(array: Any, title: str) -> Any:
    """Return an array as a tensor; numbers stay as they are."""
    made = as_tensors(array)
    if hasattr(made, "__array__") and not isinstance(made, torch.Tensor):
        raise MlxError(f"a checkpoint cannot hold {title}, of the type {made.dtype}; keep it in bfloat16")
    return made


def _restored(name: str, leaf: Any, value: Any) -> Any:
    """Return a saved value in the form of a leaf of the tree."""
    if _is_key(leaf):
        impl = str(jax.random.key_impl(leaf))
        if not isinstance(value, dict) or value.get("impl") != impl:
            raise ValueError(f"{name} is no key of the generator {impl}")
        return jax.random.wrap_key_data(_restored(name, jax.random.key_data(leaf), value["key"]), impl=impl)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        if type(value) is not type(leaf):
            raise ValueError(f"{name} is a {type(value).__name__}, and a {type(leaf).__name__} here")
        return value
    here = _tensor(np.empty(0, leaf.dtype), name).dtype, leaf.shape
    if not isinstance(value, torch.Tensor) or (value.dtype, tuple(value.shape)) != here:
        there = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name} is {there}, and {here[0]} {here[1]} here")
    if is_sharded(value):
        array, first = array_of(local_part(value)), part_of(leaf)[1]
    else:
        array, first = array_of(value), [0] * value.ndim
    if not isinstance(leaf, jax.Array):
        return array[()] if isinstance(leaf, np.generic) else array
    if leaf.weak_type and not leaf.ndim:  # it would otherwise promote the types of others
        return jnp.asarray(array.item())

    def cut(index: tuple[slice, ...]) -> Any:
        ranges = [part.indices(size) for part, size in zip(index, leaf.shape, strict=True)]
        return array[tuple(slice(start - at, stop - at) for (start, stop, _), at in zip(ranges, first, strict=True))]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, cut)


def part_of(array: jax.Array) -> tuple[Any, list[int]]:
    """Return the part of an array that the devices of this worker hold, and its position."""
    if array.is_fully_addressable:
        return np.asarray(array), [0] * array.ndim
    boxes = [
        ([part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)], shard.data)
        for shard in array.addressable_shards
    ]
    first = [min(box[dim][0] for box, _ in boxes) for dim in range(array.ndim)]
    made = np.empty([max(box[dim][1] for box, _ in boxes) - first[dim] for dim in range(array.ndim)], array.dtype)
    for box, data in boxes:
        made[tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, first, strict=True))] = data
    return made, first


def _sharded(leaf: jax.Array, title: str) -> Any:
    """Return an array of which workers hold different parts, as a sharded tensor, so that each writes its own."""
    part, _ = part_of(leaf)
    if part.shape == leaf.shape:
        return _tensor(part, title)
    spec = [item if isinstance(item, tuple) else (item,) for item in leaf.sharding.spec]
    dims = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
    placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in leaf.sharding.mesh.axis_names]
    mesh, stride = _workers(leaf.sharding.mesh), torch.empty(leaf.shape, device="meta").stride()
    return DTensor.from_local(_tensor(part, title), mesh, placements, run_check=False, shape=leaf.shape, stride=stride)


@functools.cache
def _workers(mesh: jax.sharding.Mesh) -> DeviceMesh:
    """Return the mesh of the workers, each with the block of devices that it has. Every worker must call this."""
    workers = np.vectorize(lambda device: device.process_index)(mesh.devices)
    own = np.argwhere(workers == jax.process_index())
    block = own.max(axis=0) - own.min(axis=0) + 1
    return DeviceMesh("cpu", workers[tuple(slice(None, None, size) for size in block)])
