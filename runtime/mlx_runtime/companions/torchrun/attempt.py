"""One attempt of `mlx train join`: torchrun starts this as each process of the run.

    python -m mlx_runtime.companions.torchrun.attempt FOLDER ARGUMENTS_OF_MLX_TRAIN_RUN...

Once the run has ended, for whatever reason but the loss of a process, each process writes the exit code of rank 0 to a
file in the folder, and ends as if it had succeeded, so that torchrun reports nothing.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from mlx_runtime import cli
from mlx_runtime.companions.torchrun.seats import Seat
from mlx_runtime.companions.torchrun.worker import LOST, POLL_S, wait_for, work

CONFIRM_S = 15.0
"""Time for all processes to read the outcome; afterwards, torchrun does not wait for their machines."""

RETURN_S = 1.0
"""Time for a worker to return once rank 0 has ended the run; it may wait for the job, or be busy."""


def main(folder: str, *words: str) -> int:
    """Take part in a run, and return the exit code of this process."""
    seat = Seat.read()
    if seat.rank == 0:
        return _confirmed(seat, folder, _drive(words))
    worked = threading.Event()
    follower = threading.Thread(target=_follow, args=(seat, folder, worked), daemon=True)
    follower.start()
    work(seat)
    worked.set()
    follower.join()
    return LOST  # otherwise, `_follow` has ended this process


def _confirmed(seat: Seat, folder: str, code: int) -> int:
    """Announce the outcome, wait until all processes have read it, and return the exit code of this one."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it this attempt
        store = seat.store()
        store.set("outcome", str(code))
        if code == LOST:
            return LOST
        Path(folder, "0").write_text(str(code))
        until = time.monotonic() + CONFIRM_S
        while (confirmed := store.add("confirmed", 0) + 1) < seat.world_size and time.monotonic() < until:
            time.sleep(POLL_S)
        if confirmed == seat.world_size:
            return 0
    return LOST


def _follow(seat: Seat, folder: str, worked: threading.Event) -> None:
    """End this process once the run has ended, unless a loss has ended it."""
    with contextlib.suppress(RuntimeError):
        store = seat.store()
        if (outcome := int(wait_for(store, "outcome"))) != LOST:
            if not worked.wait(RETURN_S):
                print("ended     by rank 0; see its output", flush=True)
            Path(folder, str(seat.rank)).write_text(str(outcome))
            store.add("confirmed", 1)
            sys.stdout.flush()
            os._exit(0)


def _drive(words: tuple[str, ...]) -> int:
    """Execute `mlx train run`, and return its exit code."""
    sys.argv = sys.orig_argv = ["mlx", "train", "run", *words]
    try:
        cli.main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
