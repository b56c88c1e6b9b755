"""The parts of an unfinished output: blocks of rows in a folder next to it, from which the same command continues."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.storage.documents import from_json
from mlx_runtime.storage.local import write_atomic


class Parts:
    """The folder of the parts, used by one process at a time.

    .predictions.parquet.parts/
        manifest.json         the command and its inputs
        00000000-2048.arrow   block 0 with 2,048 rows; a block with fewer rows is the last, or behind it

    Args:
        output: the file that the parts will be joined to.
        manifest: plain values that determine the parts.

    Raises:
        UsageError: another process writes the same output.
        StorageError: the folder cannot be written.
    """

    def __init__(self, output: Path, manifest: dict[str, Any]) -> None:
        self.folder = output.with_name(f".{output.name}.parts")
        self.note = ""  # line for the user if the parts of another command were removed
        self.finished: dict[int, int] = {}  # rows of each finished block
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(self.folder / "manifest.json", json.loads(json.dumps(manifest)))
        except BlockingIOError:
            raise UsageError(
                f"another process is writing {output}; wait for it, or name another file with -o"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _begin(self, file: Path, manifest: dict[str, Any]) -> None:
        """Find the finished blocks of the same command, or remove those of another."""
        try:
            before = from_json(file.read_bytes(), {})
        except (OSError, ValueError):  # new, or damaged
            before = {}
        if changed := [name for name in manifest if before.get(name) != manifest[name]]:
            if files := self._files():
                self.note = f"starting over: changed since the interrupted command: {', '.join(changed)}"
            for path in files:
                path.unlink()
            write_atomic(file, json.dumps(manifest))
        for path in self._files():
            number, _, rows = path.stem.partition("-")
            self.finished[int(number)] = int(rows)

    def files(self) -> list[Path]:
        """Return the files of the parts that have rows, in order."""
        return [path for path in self._files() if not path.stem.endswith("-0")]

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.arrow"))

    def close(self, *, finished: bool = False) -> None:
        """Let another process use the folder. It is removed if the output is finished, or no part has rows."""
        if finished or not self.files():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def part_name(number: int, rows: int) -> str:
    """Return the name of the file of a block."""
    return f"{number:08d}-{rows}.arrow"
