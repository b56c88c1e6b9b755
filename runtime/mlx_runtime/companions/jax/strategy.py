"""The strategy of runs in JAX: all workers together train one model, on a mesh of the devices of all."""

import contextlib
import math
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlx_runtime.companions.jax.options import problem
from mlx_runtime.companions.notebook.backends import connected
from mlx_runtime.config.building import build
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.events import WorkersStarted
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.checkpoints.groups import members

_CPU = torch.device("cpu")


class JAX(DDP):
    """Gives each worker its place in the mesh, which is that of all computations in the loop, also of eager ones.

    Torch stays on the CPU, where it reads batches and computes metrics.

    Attributes:
        mesh: The devices of all workers, with the axes of `cfg.mesh`.
    """

    alone, library = True, "jax"
    mesh: Mesh

    @staticmethod
    def refusal(cfg: Any) -> str | None:
        return problem(cfg)

    def __init__(self, cfg: Any, topology: Topology) -> None:
        super().__init__(cfg, topology)
        self.shards = topology.world_size > 1
        self._whole: dict[int, jax.Array] = {}  # masks, by number of rows

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        cfg, topology = self.cfg, self.topology
        jax.config.update("jax_traceback_filtering", "off")  # else, errors have notes about hidden frames
        if cfg.debug.stop_on_nan:
            jax.config.update("jax_debug_nans", True)
        with contextlib.ExitStack() as stack:
            if topology.world_size > 1:
                own = cfg.gpus_per_worker > 1  # then the worker sees no others
                device = torch.device(topology.device.type) if own else topology.device
                try:
                    stack.enter_context(connected("jax", replace(topology, device=device)))
                except RuntimeError as error:
                    if type(error) is not RuntimeError:  # those of lost workers are of another class
                        raise
                    cure = "make it a default of a constructor, or call it in the function that uses it"
                    raise ConfigError(
                        f"JAX has computed while src was imported, so it cannot connect; {cure}"
                    ) from error
            elif topology.device.type == "cuda":
                jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(cfg.gpus_per_worker))))
            if (cfg.use_gpu or topology.device.type != "cpu") and jax.default_backend() == "cpu":
                raise ConfigError(
                    f"rank {topology.rank} should use a GPU, but JAX finds none; install a jaxlib for GPUs, with "
                    'pip install "jax[cuda13]", or set cfg.use_gpu=false'
                )
            self.mesh = mesh_of(cfg.mesh, np.array(jax.devices()))
            self.topology = placed(topology, self.mesh)
            stack.enter_context(jax.set_mesh(self.mesh))
            stack.callback(multiprocessing.set_start_method, multiprocessing.get_start_method(), force=True)
            multiprocessing.set_start_method("forkserver", force=True)  # JAX has threads, and may not be forked
            multiprocessing.set_forkserver_preload(["mlx_runtime.jax"])
            yield

    def build(self, node: Mapping[str, Any]) -> Any:
        return build(node, "models")

    def started(self, models: Any) -> WorkersStarted:
        params = [nnx.state(model, nnx.Param) for model in members(models, nnx.Module).values()]
        total = sum(item.size for item in jax.tree.leaves(params))
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        described = (f"on the mesh {axes}",) if self.mesh.size > self.mesh.shape.get("data", 1) else ()
        return WorkersStarted(jax.devices()[0].device_kind, total, self.topology.world_size, described)

    @cached_property
    def of_batches(self) -> NamedSharding:
        """The sharding of batches, along the axis `data`."""
        return NamedSharding(self.mesh, PartitionSpec("data" if "data" in self.mesh.shape else None))

    def put(self, rows: Any) -> jax.Array:
        """Return the array of all workers from an array of NumPy with the rows of this one."""
        if self.topology.world_size == 1:  # the same, in three quarters of the time
            return jax.device_put(rows, self.of_batches)
        return jax.make_array_from_process_local_data(self.of_batches, rows)

    def whole_mask(self, rows: int) -> jax.Array:
        """Return the mask of batches that have this number of rows per worker and no padding: always the same one."""
        if rows not in self._whole or self._whole[rows].is_deleted():  # because it was donated
            self._whole[rows] = self.put(np.ones(rows, bool))
        return self._whole[rows]

    @property
    def row_multiple(self) -> int:
        """A number that divides the rows of each worker in a batch."""
        return int(self.mesh.shape.get("data", 1)) // self.topology.data_parallel_size


def mesh_of(sizes: Mapping[str, int], devices: Any) -> Mesh:
    """Return the mesh of all devices.

    Raises:
        ConfigError: the axes do not make up the devices.
    """
    known = math.prod(size for size in sizes.values() if size != -1)
    shape = [len(devices) // known if size == -1 else size for size in sizes.values()]
    if math.prod(shape) != len(devices):
        raise ConfigError(
            f"cfg.mesh is {dict(sizes)}, but the workers have {len(devices)} devices together; the product of its axes "
            "must be their number, or divide it if one axis is -1"
        )
    return Mesh(devices.reshape(shape), tuple(sizes))


def placed(topology: Topology, mesh: Mesh) -> Topology:
    """Return the position of a worker in a mesh: workers at the same position along `data` read the same rows.

    Raises:
        ConfigError: a worker would read a part of another one's rows.
    """
    axis = mesh.axis_names.index("data") if "data" in mesh.axis_names else None
    rows: dict[int, set[int]] = {}
    for position, device in np.ndenumerate(mesh.devices):
        rows.setdefault(device.process_index, set()).add(0 if axis is None else position[axis])
    replicas: dict[tuple[int, ...], list[int]] = {}
    for rank, own in sorted(rows.items()):
        replicas.setdefault(tuple(sorted(own)), []).append(rank)
    if sum(map(len, replicas)) != len(set().union(*replicas)):
        raise ConfigError(f"cfg.mesh is {dict(mesh.shape)}, whose axis data divides the devices of a worker unequally")
    ranks = tuple(tuple(ranks) for _, ranks in sorted(replicas.items()))
    size = max(map(len, ranks))
    return replace(topology, device=_CPU, model_parallel_size=size, replica_ranks=ranks if size > 1 else ())
