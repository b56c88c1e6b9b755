"""Reading batches ahead of the loop, in a thread.

The loop sees no difference: it receives the same batches in the same order, and each exception at its batch. Batches
count as read only when the loop receives them. Global random generators cannot be separate for a thread, so datasets
that draw from them are read by the loop itself.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from mlx_runtime.data.batches import Batch, move_tensors
from mlx_runtime.distributed.randomness import random_state, same_random_state

DEFAULT_PREFETCH = 2
"""Default number of batches to read ahead, where neither user code nor global random numbers are involved."""


def read_ahead(
    batches: Iterator[Batch], count: int | None, *, draws: Callable[[], bool] = lambda: False, pin_memory: bool = False
) -> Iterator[Batch]:
    """Yield batches, up to `count` of which a thread reads ahead. Closing the iterator ends the thread.

    Args:
        batches: The loop reads the first one itself, and all others if it draws from the global generators.
        count: Maximum number of batches ahead, at least 1.
        draws: Called after the first batch; returns True if it drew from separate random generators.
        pin_memory: Move tensors to pinned memory, for the GPU of this worker.
    """
    before = random_state()
    first = next(batches, None)
    if first is None:
        return
    if draws() or not same_random_state(before, random_state()):
        yield first
        yield from batches
        return
    count = DEFAULT_PREFETCH if count is None else count
    thread = ReadingThread(batches, count, torch.cuda.current_device() if pin_memory else None)
    thread.start()
    batch: Batch | None = first
    error: BaseException | None = None
    try:
        while batch is not None:
            yield batch
            batch, error = thread.take()
            if error is not None:
                raise error
    finally:
        error = None  # which refers to this frame
        thread.end()


_THREADS: "weakref.WeakSet[ReadingThread]" = weakref.WeakSet()
_PAUSED: "list[ReadingThread]" = []


def _pause() -> None:
    for thread in list(_THREADS):
        thread.reading.acquire()
        _PAUSED.append(thread)


def _resume() -> None:
    while _PAUSED:
        _PAUSED.pop().reading.release()


def _forget() -> None:
    _THREADS.clear()
    _PAUSED.clear()


os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_forget)


class ReadingThread(threading.Thread):
    """Reads batches as long as fewer than `count` are waiting to be taken.

    It pauses between two batches when this process forks, so that a child inherits no lock of user code.

    Args:
        batches: Iterator that nothing else reads while the thread runs.
        count: Maximum number of batches ahead.
        gpu: Index of the GPU for which tensors are pinned; None means no pinning.
    """

    def __init__(self, batches: Iterator[Batch], count: int, gpu: int | None = None) -> None:
        super().__init__(name="read ahead", daemon=True)
        self._batches, self._gpu = batches, gpu
        self._free = threading.Semaphore(count)
        self._read: queue.SimpleQueue[tuple[Batch | None, BaseException | None]] = queue.SimpleQueue()
        self._ended = False
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # each thread has its own
        self.reading = threading.RLock()  # the thread itself may fork, in user code
        _THREADS.add(self)

    def take(self) -> tuple[Batch | None, BaseException | None]:
        """Return the next batch, or the exception raised in its place; neither at the end."""
        taken = self._read.get()
        self._free.release()
        return taken

    def end(self) -> None:
        """End the thread after its current batch."""
        self._ended = True
        self._free.release()
        if threading.current_thread() is not self:  # it is if the thread garbage-collects an abandoned iterator
            self.join()

    def run(self) -> None:
        grad, inference = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)  # each thread has its own
            going_on = True
            while going_on and self._free.acquire() and not self._ended:
                with self.reading:
                    going_on = self._read_one()

    def _read_one(self) -> bool:
        """Read a batch. Return False if it was the last."""
        try:
            batch = next(self._batches, None)
            if batch is not None and self._gpu is not None:
                batch = move_tensors(batch, _pin)
        except BaseException as error:
            self._read.put((None, error))
            return False
        self._read.put((batch, None))
        return batch is not None


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
