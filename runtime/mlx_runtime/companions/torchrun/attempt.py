"""One attempt of `mlx train join`: torchrun starts this as each process of the run.

    python -m mlx_runtime.companions.torchrun.attempt FOLDER ARGUMENTS_OF_MLX_TRAIN_RUN...

Once the run has ended, for whatever reason but the loss of a process, each process writes the exit code of rank 0 to a
file in the folder, and ends as if it had succeeded, so that torchrun reports nothing.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from mlx_runtime import cli
from mlx_runtime.companions.torchrun.seats import Seat
from mlx_runtime.companions.torchrun.worker import LOST, POLL_S, wait_for, work

CONFIRM_S = 15.0
"""Time for all processes to read the outcome; afterwards, torchrun does not wait for their machines."""


def main(folder: str, *words: str) -> int:
    """Take part in a run, and return the exit code of this process."""
    seat = Seat.read()
    code = work(seat) if seat.rank else _drive(words)
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it this attempt
        store = seat.store()
        if seat.rank == 0:
            store.set("outcome", str(code))
        if (outcome := int(wait_for(store, "outcome"))) == LOST:
            return LOST
        Path(folder, str(seat.rank)).write_text(str(outcome))
        until, confirmed = time.monotonic() + CONFIRM_S, store.add("confirmed", 1)
        while seat.rank == 0 and confirmed < seat.world_size and time.monotonic() < until:
            time.sleep(POLL_S)
            confirmed = store.add("confirmed", 0)
        if seat.rank or confirmed == seat.world_size:
            return 0
    return LOST


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
