"""Times the imports of every Python process that has this folder in its PYTHONPATH.

Each process appends lines `library seconds` to a file named by its pid in the folder `MLX_BENCH_IMPORTS`. Python's own
`-X importtime` writes to stderr, which launchers and Ray redirect, and cannot distinguish a fork from its parent.
"""

import importlib._bootstrap as bootstrap
import os
import threading
import time
from collections import defaultdict

FOLDER = os.environ["MLX_BENCH_IMPORTS"]
LIBRARIES = os.environ["MLX_BENCH_LIBRARIES"].split()
"""Libraries to report, longest name first. Imports by a library that are not listed count as its own."""

find_and_load = bootstrap._find_and_load  # called by every import of a module that is not loaded yet
under_way = threading.local()


def timed(name, import_):
    """Import a module, and add its own seconds, without those of nested imports, to its library."""
    stack = under_way.__dict__.setdefault("stack", [])
    seconds = under_way.__dict__.setdefault("seconds", defaultdict(float))
    inherited = stack[-1]["library"] if stack else "other"
    library = next((known for known in LIBRARIES if f"{name}.".startswith(f"{known}.")), inherited)
    frame = {"library": library, "inner": 0.0}
    stack.append(frame)
    began = time.perf_counter()
    try:
        return find_and_load(name, import_)
    finally:
        took = time.perf_counter() - began
        stack.pop()
        seconds[library] += took - frame["inner"]
        if stack:
            stack[-1]["inner"] += took
        else:  # immediately, because many processes are killed in the end
            lines = "".join(f"{library} {seconds.pop(library)}\n" for library in list(seconds))
            with open(f"{FOLDER}/{os.getpid()}", "a") as file:  # noqa: PTH123 - imports nothing
                file.write(lines)


bootstrap._find_and_load = timed
