"""`breakpoint()` in user code, which may start pdb only in processes with a terminal."""

import contextlib
import functools
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mlx_runtime.events import Notice
from mlx_runtime.loop.channel import Sink


@contextlib.contextmanager
def at_breakpoint(allowed: Callable[[], bool]) -> Iterator[None]:
    """Call `allowed` at each `breakpoint()` within the block, and start the debugger if it returns True.

    `PYTHONBREAKPOINT=0` turns breakpoints off, as usual.
    """
    before = sys.breakpointhook

    def hook(*args: Any, **options: Any) -> Any:
        debugger = os.environ.get("PYTHONBREAKPOINT", "")
        if debugger == "0" or not allowed():
            return None
        if before is not sys.__breakpointhook__ or debugger not in ("", "pdb.set_trace"):
            return before(*args, **options)
        return pdb.Pdb().set_trace(sys._getframe().f_back)  # debug the user's frame; `before` would stop in this one

    sys.breakpointhook = hook
    try:
        yield
    finally:
        sys.breakpointhook = before


NO_TERMINAL = "workers have no terminal; to debug, add cfg.start_workers=0"


def no_pdb(sink: Sink, why: str = NO_TERMINAL) -> Callable[[], bool]:
    """Return a function that rejects pdb, with one notice, because there is no terminal. It allows other debuggers."""
    notify_once = functools.cache(lambda: sink.send(Notice(f"breakpoint() is ignored: {why}", once=True)))

    def allowed() -> bool:
        debugger = os.environ.get("PYTHONBREAKPOINT", "")
        if debugger and not debugger.startswith("ray."):  # Ray's own debugger would wait for a user to attach
            return debugger != "pdb.set_trace"
        notify_once()
        return False

    return allowed
