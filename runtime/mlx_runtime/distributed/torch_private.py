"""All uses of the private API of torch 2.13 and 2.14. `test_torch_private.py` fails when torch changes it."""

import datetime
import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroupGloo, distributed_c10d

from mlx_runtime.distributed.handshake import listening_sockets, prove, refuse_connections
from mlx_runtime.distributed.wrapping import by_mesh

LOOPBACK = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
"""Name of the loopback interface."""

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


@contextmanager
def recorded_allocations() -> Iterator[None]:
    """Record allocations of GPU memory in the block, for `dump_memory`."""
    record = partial(torch.cuda.memory._record_memory_history, stacks="python", max_entries=100_000)
    record("all")
    try:
        yield
    finally:
        record(None)


def dump_memory(file: Path) -> None:
    """Write a snapshot of GPU memory for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]


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


def drop_unreduced_gradients(model: Any) -> None:
    """Drop the gradients that a sharded model has accumulated without reducing them.

    `FSDPModule.reset_iter_state` should drop them, but does not.
    """
    from torch.distributed.fsdp import FSDPModule  # here, because it takes seconds

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):  # after the first forward pass
                        param._unsharded_param.grad = None


def overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scaler has skipped the step of an optimizer, because gradients were not finite."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler for optimizers that may have both sharded and unsharded parameters.

    If the gradient of a shard overflows, all workers skip the step.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: torch.Tensor, allow_fp16: bool) -> Any:
        params: list[torch.Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        found: dict[torch.device, torch.Tensor] = {}
        for part in by_mesh(params):
            alike: Any = SimpleNamespace(param_groups=[{"params": part}])
            overflowed = super()._unscale_grads_(alike, inv_scale, found_inf.clone(), allow_fp16)
            for device, value in overflowed.items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found


class _Metaclass(type(ProcessGroupGloo)):  # type: ignore[misc]  # that of pybind11
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ProcessGroupGloo)  # torch returns groups as objects of their base class


class PrivateGloo(ProcessGroupGloo, metaclass=_Metaclass):
    """A gloo group of the run's workers that nobody else can join; see `handshake`."""

    host: str | None = None  # address to listen on; None for the loopback interface

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta, enable_reconfigure: bool = False
    ) -> None:
        assert not enable_reconfigure  # of torch 2.14; `init_process_group` has it, `new_group` does not
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        before = listening_sockets()
        options._devices = [
            ProcessGroupGloo.create_device(interface="" if self.host else LOOPBACK, hostname=self.host or "")
        ]
        added = listening_sockets() - before
        options._threads, options._timeout = 2, timeout  # as by default
        super().__init__(store, rank, size, options)
        prove(self, store, rank, size)
        if len(added) == 1:  # otherwise another thread opened a socket, too
            refuse_connections(*added)


def keep_groups_private(host: str | None = None) -> None:
    """Make every gloo group that this process creates from now on a `PrivateGloo`, including those of user code.

    NCCL checks a random number in the store, and listens on the loopback interface, too. If workers are on several
    machines, this one is reached at `host`, and NCCL chooses its interfaces.
    """
    PrivateGloo.host = host
    if host is None:
        os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    distributed_c10d.ProcessGroupGloo = PrivateGloo  # type: ignore[misc]
