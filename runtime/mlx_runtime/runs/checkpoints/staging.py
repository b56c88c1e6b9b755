"""Copies of a state on the CPU, to be stored while training continues."""

import collections
from typing import Any

import torch

from mlx_runtime.runs.checkpoints.groups import map_tensors


class Staging:
    """Copies the tensors of states to the CPU, where training does not change them, one state at a time.

    Tensors on a GPU are copied to pinned memory, which is reused for the next state, because allocating it takes longer
    than copying. The caller does not wait for these copies. The GPU executes them in order, after the last update and
    before the next one, so it pauses only for the copies, at the speed of its bus, and not for the storage.
    """

    def __init__(self) -> None:
        self.free: dict[Any, list[torch.Tensor]] = {}
        self.used: dict[Any, list[torch.Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Begin to copy a state; the memory of the previous one is free."""
        self.free, self.used = self.used, collections.defaultdict(list)
        self._devices.clear()

    def copy_tree(self, value: Any) -> Any:
        """Return a copy of plain values, which is complete after `wait`."""
        return map_tensors(value, self.copy)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, which is complete after `wait`."""
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        alike = tensor.dtype, tensor.shape, tensor.stride()
        free = self.free.get(alike)
        pinned = free.pop() if free else _pinned_like(tensor)
        self.used[alike].append(pinned)
        self._devices.add(tensor.device)
        return pinned.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the end of a state, whose copies are complete when each GPU has finished its queued work."""
        self._events = []
        for device in self._devices:
            # Otherwise, the waiting thread would keep a core busy.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        """Wait until the copies are complete, in any thread."""
        for event in self._events:
            event.synchronize()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the machine limits pinned memory; copying then takes longer
        return torch.empty_like(tensor, device="cpu")
