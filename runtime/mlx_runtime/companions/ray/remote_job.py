"""The job of a command that runs on a cluster for another machine: `mlx --on URL xp ls` there is this, with `xp ls`.

The command runs in an empty folder, with links to the uploaded files; other files in it are sent back.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from mlx_runtime.companions.ray import frames
from mlx_runtime.errors import MlxError
from mlx_runtime.storage.files import storage_at

FILES_BYTES = 64 << 20
"""Maximum size of all files that are sent back."""

MIRROR_S, DAY_S = 2.0, 86_400.0
"""Interval for looking for new events, and time after which a mirror ends whose reader was lost."""


def main(words: Sequence[str]) -> int:
    """Run a command. Return its exit code."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(frames.Stream(kind)), "utf-8", "backslashreplace", line_buffering=True)
        for kind in ("out", "err")
    )
    if words[1] == "launch":  # uploads this folder, and writes nothing
        code = _run(words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for entry in Path.cwd().iterdir():
                Path(folder, entry.name).symlink_to(entry)
            os.chdir(folder)
            code = _run(words) or _send_files(Path(folder))
    frames.release()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    frames.send(kind="exit", code=code)
    return code


def _run(words: Sequence[str]) -> int:
    from mlx_runtime.cli import mlx

    try:
        mlx.main([*words], prog_name="mlx")
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _send_files(folder: Path) -> int:
    """Send the files that the command has written here. Return an exit code."""
    found = [Path(above, name) for above, _, names in os.walk(folder) for name in names]
    found = [file for file in found if file.is_file() and not file.is_symlink()]
    size = sum(file.stat().st_size for file in found)
    if size > FILES_BYTES:
        problem = f"{len(found):,} files of {size / 1e6:,.0f} MB were not sent; a command sends {FILES_BYTES / 1e6:.0f}"
        print(f"error: {problem} MB at most", file=sys.stderr)
        return 1
    for file in found:
        frames.send_file(file.relative_to(folder).as_posix(), file.read_bytes())
    return 0


def mirror(root: str) -> None:
    """Send the event files below a folder or URI, and what is added to them, until the job is stopped."""
    sent, storage, until = dict[str, int](), storage_at(root), time.monotonic() + DAY_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, MlxError):
            for item in storage.below():
                if ".tfevents." in item.name and item.size_bytes > sent.get(item.path, 0):
                    with storage.open(*item.path.split("/")) as stream:
                        stream.seek(sent.get(item.path, 0))
                        content = stream.read()
                    sent[item.path] = sent.get(item.path, 0) + len(content)
                    frames.send_file(item.path, content)
        time.sleep(MIRROR_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
