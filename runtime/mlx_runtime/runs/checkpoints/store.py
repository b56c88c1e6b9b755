"""The checkpoints of one run on disk: store them, optionally in the background, verify, load and prune them."""

import collections
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.errors import ConfigError, StorageError, short_message
from mlx_runtime.runs.checkpoints.groups import (
    DamagedError,
    State,
    decoded,
    io_errors,
    map_tensors,
)
from mlx_runtime.runs.checkpoints.index import (
    ABOUT,
    INDEX,
    STATE,
    CheckpointInfo,
    best_first,
    checkpoints_by_name,
    list_checkpoints,
    no_description,
    read_description,
)
from mlx_runtime.storage.files import Storage, join_path, parent_of, storage_at, storage_errors, to_json
from mlx_runtime.storage.publishing import HashingWriter, Publication, recover, sha256_of, unpublish

if TYPE_CHECKING:
    from mlx_runtime.companions.sharding.saving import Parts

PARTS = {
    *("epoch", "finished", "global_step", "seed", "world_size", "config", "models", "optimizers", "tools", "own"),
    *("loaders", "numbers", "on_device", "ranks", "scaler", "tracking"),
}
"""Keys of a state."""

UNFINISHED = 2
"""Number of checkpoints of an unfinished epoch to keep."""

START_S = 5.0
"""Time after which a thread that has not begun counts as never started."""


class CheckpointStore:
    """The checkpoints of one run, in a folder or at a URI.

    Methods raise StorageError if the storage does not answer, or refuses to write.
    """

    def __init__(self, root: str) -> None:
        self.storage = storage_at(root)
        self._damaged: dict[str, str] = {}  # problems by name

    def all(self, *, report: bool = False) -> list[CheckpointInfo]:
        """Return the complete checkpoints, oldest first; see `list_checkpoints`."""
        return list_checkpoints(self.storage, report=report)

    def any(self) -> bool:
        """Return True if there are checkpoints, even damaged ones."""
        return bool(checkpoints_by_name(self.storage))

    def path(self, checkpoint: CheckpointInfo) -> str:
        """Return the folder or URI of a checkpoint."""
        return join_path(self.storage.root, checkpoint.name)

    def save(
        self, state: State, checkpoint: CheckpointInfo, allowed: Callable[[], None] = lambda: None
    ) -> CheckpointInfo:
        """Store a checkpoint atomically. Return its description with the checksum.

        `allowed` is called before it becomes visible, and raises if another driver owns the run.
        """
        try:
            return self.storage.retry(partial(self._save, state, checkpoint, allowed))
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{self.problem}: {short_message(error)}") from error

    def _save(self, state: State, checkpoint: CheckpointInfo, allowed: Callable[[], None]) -> CheckpointInfo:
        with Publication(self.storage, checkpoint.name, ABOUT) as publication:
            about = self.write_state(publication, state, checkpoint)
            return self.publish(publication, about, allowed)

    @staticmethod
    def write_state(publication: Publication, state: State | None, checkpoint: CheckpointInfo) -> CheckpointInfo:
        """Write a state. Return the description with its checksum."""
        file_name = publication.unique(STATE)
        try:
            with HashingWriter(publication.create(file_name)) as file:
                torch.save(state, cast("IO[bytes]", file))  # it only writes
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch hides a full disk
                raise error.__context__ from None
            raise
        return replace(checkpoint, sha256=file.sha256, size_bytes=file.size_bytes, file=file_name)

    def publish(self, publication: Publication, about: CheckpointInfo, allowed: Callable[[], None]) -> CheckpointInfo:
        """Make a checkpoint visible that is written, if this is `allowed`."""
        allowed()
        publication.commit(to_json(asdict(about)).encode())
        publication.remove_others()
        self._damaged.pop(about.name, None)
        return about

    @property
    def problem(self) -> str:
        """The beginning of the error if a checkpoint cannot be stored."""
        return f"cannot write a checkpoint to {self.storage.root}"

    def load(self, checkpoint: CheckpointInfo, *, whole: bool = True) -> State:
        """Return the state of a checkpoint on the CPU, or raise ConfigError if it is damaged.

        Without `whole`, it has a `StoredTensor`, not read yet, for each sharded tensor; then `sharded` is True.
        """
        state = _load_state(self.storage, checkpoint.name, checkpoint)
        return _full(state) if whole else state

    def reject(self, checkpoint: CheckpointInfo, problem: str) -> None:
        """Note that shards of a checkpoint are damaged, so that `newest` returns the previous one."""
        self._damaged[checkpoint.name] = problem

    def newest(self, warn: Callable[[str], None]) -> tuple[CheckpointInfo, State] | None:
        """Return the newest undamaged checkpoint and its state, like `load` without `whole`; None if there is none.

        `warn` is called with a line about each newer damaged checkpoint, which a later one of its name replaces.

        Raises:
            ConfigError: all checkpoints are damaged.
        """
        checkpoints = checkpoints_by_name(self.storage)
        unknown = [name for name, item in checkpoints.items() if item is None]
        self._damaged |= {name: no_description(self.storage, name) for name in unknown}
        newest = None
        for item in sorted(filter(None, checkpoints.values()), key=lambda item: item.order, reverse=True):
            if item.name in self._damaged:
                continue
            try:
                newest = item, _load_state(self.storage, item.name, item)
                break
            except DamagedError as error:
                self._damaged[item.name] = str(error)
        if self._damaged and newest is None:
            raise ConfigError(
                "; ".join(self._damaged.values()) + ". No other checkpoint is left to resume from. "
                "Put a good copy back, or start over in a new run with --from"
            )
        for text in self._damaged.values():
            warn(f"{text}; resuming from the previous one")
        return newest

    def prune(self, keep: int, monitor: str | None, mode: str, *, latest: bool = True) -> None:
        """Keep the best checkpoints by a metric, then the newest of finished epochs, and `latest`; remove others."""
        saved = [item for item in self.storage.retry(self.all) if item.name not in self._damaged]
        finished = [item for item in saved if item.finished]
        ranked = best_first(saved, monitor, mode)
        ranked += [item for item in reversed(finished) if item not in ranked]
        last = finished[-1].order if finished else (-1, True, 0)
        unfinished = [item for item in saved if item.order > last][-UNFINISHED:]
        for item in saved:
            if item not in (*ranked[:keep], *(finished[-1:] + unfinished if latest else ())):
                with contextlib.suppress(OSError):
                    unpublish(self.storage, item.name, ABOUT)

    def clean(self) -> None:
        """Clean up after saves that were killed; only for the driver that owns the run."""
        with storage_errors(f"cannot write to {self.storage.root}"):
            recover(self.storage)


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
        """Return a copy of a tensor, which is complete after `wait`; one that is a copy has `is_copy`."""
        if getattr(tensor, "is_copy", False):
            return tensor
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


class BackgroundSaver:
    """Stores checkpoints in a thread, one at a time.

    Args:
        checkpoints: Where to store them.
        stored: Called in the thread with each complete checkpoint.
        allowed: Called in the thread before a checkpoint becomes visible; raises if another driver owns the run.
    """

    def __init__(
        self, checkpoints: CheckpointStore, stored: Callable[[CheckpointInfo], None], allowed: Callable[[], None]
    ) -> None:
        self._checkpoints, self._stored, self._allowed = checkpoints, stored, allowed
        self._saving: tuple[threading.Thread, threading.Event] | None = None  # the thread, and whether it is done
        self._error: Exception | None = None
        self._group: Any = None  # of the threads of all workers
        self._staging = Staging()

    def save(self, state: State | None, checkpoint: CheckpointInfo, parts: "Parts | None" = None) -> None:
        """Wait for the previous checkpoint, copy a state to the CPU, and start storing the copy.

        With the `parts` of sharded tensors, every worker must call this; only rank 0 passes the rest of the state.
        """
        self.wait()
        if parts is not None and self._group is None:
            # Workers may wait long for the slowest storage; the watchdog reports deadlocks.
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        self._staging.begin()
        copy = self._staging.copy_tree(state)
        if parts is None:
            save = partial(self._checkpoints.save, copy, checkpoint, self._allowed)
        else:
            store = partial(companions.part("sharding.saving").save_checkpoint, self._checkpoints, copy, checkpoint)
            save = partial(store, parts, parts.stage(self._staging), self._group, self._allowed)
        self._staging.end()
        done = threading.Event()
        thread = threading.Thread(target=self._save, args=(save, done), name="checkpoint", daemon=True)
        self._saving = thread, done
        thread.start()

    def wait(self) -> None:
        """Wait until everything is stored; raise StorageError if it could not be."""
        if self._saving is not None:
            thread, done = self._saving
            # Not `join`: it fails if Ctrl-C interrupted `start`, and after an interrupted `join` the thread counts as
            # ended.
            while not done.wait(START_S) and thread.ident is not None:
                pass
            self._saving = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _save(self, save: Callable[[], CheckpointInfo], done: threading.Event) -> None:
        try:
            self._staging.wait()
            self._stored(save())
        except Exception as error:
            self._error = error
        finally:
            done.set()


def read(path: str, *, whole: bool = True) -> State:
    """Return the state of the checkpoint in any folder, URI or mirror; see `CheckpointStore.load`."""
    if is_remote(path):
        folder, name = reader_of(path).fetch_checkpoint(path)
        path = join_path(folder.checkpoints, name)
    storage, name = (storage_at(path), ".") if Path(path).parent == Path("/") else parent_of(path)  # "/" is no storage
    with storage_errors(f"cannot read {path}"):
        about = read_description(storage, name)
        exists = about is not None or storage.size_bytes(name, STATE) is not None
    if not exists:
        raise ConfigError(
            f"there is no checkpoint at {path}: it has no {STATE}. Name one, like RUN/checkpoints/epoch_0003"
        )
    state = _load_state(storage, name, about)
    return _full(state) if whole else state


def _full(state: State) -> State:
    """Return a state with whole tensors on the CPU instead of stored ones, and attributes of tools as they were."""
    if state["sharded"]:
        state = companions.part("sharding.shards").full(state)
    return state | {"sharded": False, "tools": {name: decoded(item) for name, item in (state["tools"] or {}).items()}}


def _load_state(storage: Storage, name: str, about: CheckpointInfo | None) -> State:
    """Load a state, after a comparison with the checksum in its description. Loading never runs code."""
    file_name = about.file if about is not None else STATE
    path = join_path(storage.root, name, file_name)
    with io_errors(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(storage.open(name, file_name))
        if not storage.local:  # download it once
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.seek(0)
            file = copy
        if about is not None and sha256_of(file)[0] != about.sha256:
            raise ValueError("its SHA-256 is not the one it was saved with")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # loading anything but a state raises all kinds of errors
            raise ConfigError(f"{path} is damaged: {short_message(error)}") from error
    if missing := PARTS - (state.keys() if isinstance(state, dict) else set()):
        raise ConfigError(f"{path} was not saved by this version: it has no {', '.join(sorted(missing))}")
    index = about.index if about is not None else INDEX if storage.size_bytes(name, INDEX) is not None else None
    if index is not None:
        state = companions.part("sharding.shards").fill(state, storage, name, index, about)
    return {**state, "sharded": index is not None}
