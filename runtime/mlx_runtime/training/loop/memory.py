"""Memory of models and optimizers on a worker, and advice if there is too little."""

import contextlib
import errno
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlx_runtime.config.building import build, build_cfg, build_optimizers
from mlx_runtime.config.pretrained import without_weights
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import dump_memory
from mlx_runtime.distributed.wrapping import is_sharded, local_part
from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import join_path, size_text
from mlx_runtime.training.engines.base import Job
from mlx_runtime.training.options import TrainConfig

_CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""Text in the plain RuntimeError that torch raises if there is no memory left on the CPU."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that training needs on one worker, without activations and batches."""

    parameters: int
    gradients: int
    optimizer_states: int

    def __str__(self) -> str:
        return (
            f"parameters {size_text(self.parameters)}, gradients {size_text(self.gradients)}, "
            f"optimizer states {size_text(self.optimizer_states)}"
        )


def memory_needs(models: Any, optimizers: Any) -> MemoryNeeds:
    """Return the needs of models and optimizers on this worker, which holds some or all shards of each tensor."""
    modules = members(models, nn.Module).values()
    for part in (part for module in modules for part in module.modules() if is_sharded(part)):
        part.reshard()  # the error may have left it gathered
    params = list(dict.fromkeys(param for module in modules for param in module.parameters()))
    of_optimizers = (sum(states_after_step(item).values()) for item in members(optimizers, Optimizer).values())
    return MemoryNeeds(_bytes(params), _bytes(param for param in params if param.requires_grad), sum(of_optimizers))


def needs_of_config(tree: dict[str, Any]) -> MemoryNeeds:
    """Return the needs of the models and optimizers of a resolved conf.yaml on a worker that holds all of them.

    Calls their constructors on the meta device.
    """
    with without_weights(), torch.device("meta"):
        models = build(tree["models"], "models")
    return memory_needs(models, build_optimizers(tree["optimizers"], models) if "optimizers" in tree else None)


def describe_needs(job: Job, topology: Topology, groups: Mapping[str, Any] | None) -> str:
    """Return the needs of models and optimizers and, on a GPU, the path of a memory snapshot.

    `groups` is None for an experiment that could not be built.
    """
    stored = snapshot(job.folder, topology)  # first, because the next line frees memory
    return f"{needs_in_all(job) if groups is None else needs_here(groups)}\n{stored}".rstrip()


def needs_here(groups: Mapping[str, Any]) -> str:
    needs = memory_needs(groups.get("models"), groups.get("optimizers"))
    return f"Each worker needs, besides activations and batches: {needs}\n{ways_to_save(groups['cfg'])}"


def needs_in_all(job: Job) -> str:
    """Return the same as `needs_here` for an experiment that could not be built."""
    lines = [ways_to_save(build_cfg(job.tree["cfg"], TrainConfig))]
    with contextlib.suppress(Exception):  # constructors may need real tensors
        lines.insert(0, f"An unsharded replica needs, besides activations and batches: {needs_of_config(job.tree)}")
    return "\n".join(lines)


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
    from mlx_runtime.training.strategies.selection import strategy_class  # here, because strategies use this module

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


def states_after_step(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the bytes of each parameter's state after the first step, taken by a copy on the meta device."""
    copies = {param: _without_data(param) for group in optimizer.param_groups for param in group["params"]}
    groups = [group | {"params": [copies[item] for item in group["params"]]} for group in optimizer.param_groups]
    kind: Any = type(optimizer)
    state: Mapping[Any, Any] = {copies[param]: values for param, values in optimizer.state.items() if param in copies}
    with contextlib.suppress(Exception), torch.no_grad():  # `step` may need a closure, or other arguments
        copy = kind(groups)
        inspect.unwrap(kind.step)(copy)  # without the hooks of all optimizers
        state = copy.state
    tensors = {
        item: [value for value in values.values() if isinstance(value, torch.Tensor)] for item, values in state.items()
    }
    return {param: _bytes(tensors.get(item, [])) for param, item in copies.items()}


def _without_data(param: torch.Tensor) -> nn.Parameter:
    local = local_part(param)
    made = nn.Parameter(torch.empty_like(local, device="meta"), requires_grad=param.requires_grad)
    made.grad = torch.empty_like(made) if param.requires_grad else None
    return made


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))
