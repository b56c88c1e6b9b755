"""Errors of a worker without memory: their recognition, and the settings that would save some."""

import errno
from typing import Any

import torch

from mlx_runtime.config.building import build_cfg
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import dump_memory
from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.loop.job import Job
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import join_path

_CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""Text in the plain RuntimeError that torch raises if there is no memory left on the CPU."""


def advice(job: Job, topology: Topology) -> str:
    """Return the settings that would reduce the memory of a worker and, on a GPU, the path of a memory snapshot."""
    return f"{ways_to_save(build_cfg(job.tree['cfg'], TrainConfig))}\n{snapshot(job.folder, topology)}".rstrip()


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, says that there is no memory left on the CPU or the GPU."""
    seen = set()
    while error is not None and id(error) not in seen:  # Ray's errors may be causes of themselves
        seen.add(id(error))
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if type(error) is RuntimeError and _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def snapshot(folder: RunFolder, topology: Topology) -> str:
    """Store a memory snapshot of this worker's GPU. Return a line about it, or "" without a GPU."""
    if topology.device.type != "cuda":
        return ""
    file = folder.path / "profile" / f"memory_rank_{topology.rank}.pickle"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dump_memory(file)
        folder.push(file, must=True)
    except (OSError, RuntimeError, StorageError) as error:
        return f"A snapshot of the GPU's memory could not be stored: {short_message(error)}"
    location = join_path(folder.location, "profile", file.name)
    return f"Snapshot of the GPU's memory, for https://pytorch.org/memory_viz: {location}"


def ways_to_save(cfg: Any) -> str:
    """Return the settings that reduce the memory of a worker, as the end of an error message."""
    from mlx_runtime.loop.strategies.selection import strategy_class  # here, because strategies use this module

    ways = []
    if not strategy_class(cfg.strategy).shards:
        more = "" if cfg.start_workers > 1 else " and more workers"
        ways.append(f"cfg.strategy=fsdp{more}, to share parameters, gradients and optimizer states among the workers")
    else:
        setting = "start_workers" if cfg.sharding.shard_size is None else "sharding.shard_size"
        ways.append(f"a higher cfg.{setting}")
        ways += ["cfg.sharding.offload=cpu, for the memory of GPUs"] * (cfg.sharding.offload == "none")
    ways += ["cfg.activation_checkpointing=true"] * (cfg.activation_checkpointing is False)
    ways += ["cfg.precision=bf16"] * (cfg.precision == 32)
    return f"To save memory: {'; '.join(ways)}; a lower batch_size, with more cfg.accumulate_grad_batches"
