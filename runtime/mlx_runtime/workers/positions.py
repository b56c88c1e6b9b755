"""Positions of workers in user code: for the detection of deadlocks, and for `mlx xp ps`."""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mlx_runtime.errors import StorageError
from mlx_runtime.events import WorkerPosition
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage import documents
from mlx_runtime.storage.documents import COUNT, FLAG, NUMBER, TEXT, TIME, list_of, mapping_with
from mlx_runtime.storage.files import storage_at, to_json

ANSWER_S = 5.0
"""Time that workers have to report their positions."""

POSITIONS = "positions.json"
"""File in the run folder with the latest answer to `RunFolder.LOCATE`."""

_WORKER = mapping_with(
    {
        **{"rank": COUNT, "epoch": COUNT, "step": COUNT, "seconds": NUMBER, "gpu": FLAG, "at": TEXT},
        **{"stage": TEXT.or_null(), "waits_in": TEXT.or_null(), "host": TEXT, "pid": COUNT},
    },
    needs=("rank", "epoch", "step", "seconds", "at", "stage", "waits_in", "host", "pid"),
)
SHAPE = {"time": TIME, "workers": list_of(_WORKER), "world_size": COUNT}


class Place(NamedTuple):
    """Position of a thread: line of user code, and collective that it waits in."""

    at: str
    waits_in: str | None


def place_of(thread: int, project: Path) -> Place:
    """Return the position of a thread, or of another one in which user code waits for other workers."""
    stacks = {key: [item for item, _ in traceback.walk_stack(frame)] for key, frame in sys._current_frames().items()}
    frames = stacks.pop(thread, [])
    if _collective(frames) is None:
        waiting = (item for item in stacks.values() if _collective(item) and _users_line(item, project))
        frames = next(waiting, frames)
    return Place(_users_line(frames, project), _collective(frames))


def located(position: WorkerPosition, place: Place, seconds: float = 0.0) -> WorkerPosition:
    """Return the position of this process: a worker's progress, at a place."""
    return dataclasses.replace(position, **place._asdict(), seconds=seconds, host=socket.gethostname(), pid=os.getpid())


def answer_request(folder: RunFolder, positions: Iterable[WorkerPosition], world_size: int) -> None:
    """Store positions in the run folder, in answer to a request."""
    found = {"time": documents.now(), "world_size": world_size, "workers": [vars(item) for item in positions]}
    with contextlib.suppress(OSError, StorageError):  # the client reports that no answer has come
        storage_at(folder.location).write(to_json(found).encode(), POSITIONS)
        folder.withdraw(folder.LOCATE)


def answer_here(folder: RunFolder) -> None:
    """Store the position of a run that trains in the main thread of this process, or has no workers yet."""
    place = place_of(threading.main_thread().ident or 0, Path.cwd())
    answer_request(folder, [located(WorkerPosition(0), place)], 1)


def read_answer(folder: RunFolder) -> dict[str, Any]:
    """Return the stored positions; raises OSError or ValueError if there are none."""
    return documents.from_json(folder.document(POSITIONS), SHAPE, needs=tuple(SHAPE))


def collect(ask: Callable[[], None], positions: dict[int, WorkerPosition], world_size: int) -> list[WorkerPosition]:
    """Ask workers for their positions, and return those that another thread has put into `positions` in time."""
    positions.clear()
    ask()
    deadline = time.monotonic() + ANSWER_S
    while len(positions) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    return [positions[rank] for rank in sorted(positions)]


def _is_users(frame: FrameType, project: Path) -> bool:
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(project) and "site-packages" not in file.parts


def _users_line(frames: Sequence[FrameType], project: Path) -> str:
    for frame in frames:
        if _is_users(frame, project):
            file = Path(frame.f_code.co_filename).relative_to(project)
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _collective(frames: Sequence[FrameType]) -> str | None:
    """Return the call that waits for other workers, if Python can observe it."""
    outermost = None
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/distributed/distributed_c10d.py") and not name.startswith("_"):
            outermost = name
        elif "/mlx_runtime/distributed/" in file and outermost is None:
            outermost = f"{name} of mlx_runtime"
        elif file.endswith("torch/autograd/graph.py") and outermost is None:
            return "backward (the all_reduce of gradients)"
        elif file.endswith("torch/nn/parallel/distributed.py") and outermost is None:
            return "forward of DistributedDataParallel (the broadcast of buffers)"
    return outermost
