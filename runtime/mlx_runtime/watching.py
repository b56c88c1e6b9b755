"""Tells when the workers of a run wait for each other for ever, and where each of them stands.

Every worker notes each step. When it has taken none for `cfg.hang_timeout_s` it tells the driver, which asks all of
them where they stand and judges by their answers.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ANSWER_S = 5.0
"""How long the driver waits for workers to say where they stand."""


class Watch:
    """Watches the thread that makes it.

    Args:
        timeout_s: without a step, after which `tell` is called, again and again.
        tell: takes what `stands` gives.
        step: gives epoch, step and stage of this worker.
        project: whose frames are the user's.
    """

    def __init__(
        self,
        timeout_s: float,
        tell: Callable[[dict[str, Any]], None],
        step: Callable[[], dict[str, Any]],
        project: Path,
    ) -> None:
        self._timeout_s, self._tell, self._step, self._project = timeout_s, tell, step, project
        self._thread = threading.get_ident()
        self._last = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def beat(self) -> None:
        """A step was taken."""
        self._last = time.monotonic()

    def close(self) -> None:
        self._done.set()

    def stands(self) -> dict[str, Any]:
        """Where the thread is: what `step` gives, `at` (a line of the user's), `waits_in` (a collective), `seconds`."""
        frames = _frames(sys._current_frames().get(self._thread))
        return self._step() | {
            "at": _users_line(frames, self._project),
            "waits_in": _collective(frames),
            "seconds": time.monotonic() - self._last,
        }

    def _watch(self) -> None:
        told = self._last
        while not self._done.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - max(self._last, told) > self._timeout_s:
                told = time.monotonic()
                self._tell(self.stands())


def verdict(answers: Mapping[int, Mapping[str, Any]], world_size: int, least_s: float = 0.0) -> str | None:
    """What to tell about workers that took no step for long, or None when they are merely busy.

    They hang when one of them waits for others, or does not even answer. On GPUs Python does not see what waits: there
    they hang when they stand at different steps or lines.

    Args:
        answers: where each rank stands.
        world_size: ranks in all.
        least_s: a rank that took a step so recently is at work.
    """
    silent = [rank for rank in range(world_size) if rank not in answers]
    if any(answer["seconds"] < least_s for answer in answers.values()):
        return None
    apart = len({(answer["step"], answer["at"]) for answer in answers.values() if answer["gpu"]}) > 1
    if not silent and not apart and not any(answer["waits_in"] for answer in answers.values()):
        return None
    lines = []
    for rank in range(world_size):
        if rank in silent:
            lines.append(f"rank {rank} does not answer: its process is stopped, or its node is cut off")
            continue
        answer = answers[rank]
        where = f"waits for the others in {answer['waits_in']}" if answer["waits_in"] else "is at work"
        at = f", {answer['at']}" if answer["at"] else ""
        step = f"epoch {answer['epoch'] + 1}, {answer['stage'] or 'before the first pass'}"
        step += f" step {answer['step']}" if answer["stage"] else ""
        lines.append(f"rank {rank} {where} since {answer['seconds']:.0f} s: {step}{at}")
    return "\n  ".join(lines)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the innermost to the outermost."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _users_line(frames: Sequence[FrameType], project: Path) -> str:
    for frame in frames:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(project) and "site-packages" not in file.parts:
            return f"{file.relative_to(project)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _collective(frames: Sequence[FrameType]) -> str | None:
    """The call that waits for other workers, as far as Python can see it."""
    found = None
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/distributed/distributed_c10d.py") and not name.startswith("_"):
            found = name  # the outermost of these is what was called
        elif file.endswith("mlx_runtime/parallel.py") and found is None:
            found = f"{name} of mlx_runtime"
        elif file.endswith("torch/autograd/graph.py") and found is None:
            return "backward (the all_reduce of gradients)"
        elif file.endswith("torch/nn/parallel/distributed.py") and found is None:
            return "forward of DistributedDataParallel (the broadcast of buffers)"
    return found
