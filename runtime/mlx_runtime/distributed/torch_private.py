"""Uses of the private API of torch 2.13 and 2.14, besides that of process groups in `handshake`.

`test_torch_private.py` fails when torch changes it.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

BROADCAST_BYTES = 250 * 2**20
"""Size of each broadcast, as in DDP."""


def cuda_survives_fork() -> bool:
    """Return True if processes that are forked from this one can use CUDA.

    They cannot if CUDA itself has counted the GPUs here, which torch falls back to where NVML does not work.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts any thread as unsafe
        child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


def broadcast_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors of any types with the values of rank 0, in few collectives. Every worker must call this."""
    group: Any = torch.distributed.group.WORLD
    torch.distributed._broadcast_coalesced(group, list(tensors), BROADCAST_BYTES, 0)  # type: ignore[attr-defined]


def sync_buffers(models: Iterable[torch.nn.Module]) -> None:
    """Fill the saved buffers of replicated models with those of rank 0. Every worker must call this.

    DDP does so before each forward pass, but not for models and parts of models that are called without it.
    """
    if saved := [buffer for model in models for buffer in saved_buffers(model).values()]:
        broadcast_tensors(saved)


def relearn_parameters(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper average the gradients of all parameters that require gradients now.

    It has chosen them when it was constructed. As when it is unpickled, its process group is that of all workers.
    """
    wrapper.__setstate__(wrapper.__getstate__())  # type: ignore[no-untyped-call]
    for hook, state in wrapper._comm_hooks:
        torch.distributed._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]


@contextmanager
def outside_data_loader() -> Iterator[None]:
    """Hide within the block that a `DataLoader` runs this process: `get_worker_info()` returns None."""
    worker = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are part of a model's state, by name."""
    held = [(path, part, *item) for path, part in model.named_modules() for item in part.named_buffers(recurse=False)]
    return {
        f"{path}.{name}": buffer.data
        for path, part, name, buffer in held
        if name not in part._non_persistent_buffers_set
    }


def overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scaler has skipped the step of an optimizer, because gradients were not finite."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())
