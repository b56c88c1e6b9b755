"""The parts of an unfinished output: blocks of rows in a folder next to it, from which the same command continues."""

import fcntl
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.storage.documents import from_json
from mlx_runtime.storage.local import write_atomic

MANIFEST = "manifest.json"


class Parts:
    """The folder of the parts, used by one process at a time.

    .predictions.parquet.parts/
        manifest.json         the command and its inputs
        00000000-2048.arrow   block 0 with 2,048 rows; the first block with fewer rows than a block is the last

    Args:
        output: the file that the parts will be joined to.
        manifest: plain values that determine the parts.
        block_rows: rows per block.

    Raises:
        UsageError: another process writes the same output.
        StorageError: the folder cannot be written.
    """

    def __init__(self, output: Path, manifest: dict[str, Any], block_rows: int) -> None:
        self.folder = output.with_name(f".{output.name}.parts")
        self.note = ""  # line for the user: the parts continue, or replace those of another command
        self._block_rows, self._finished, self._end = block_rows, dict[int, int](), math.inf
        try:
            self._begin(output, json.loads(json.dumps(manifest)))
        except OSError as error:
            raise StorageError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _begin(self, output: Path, manifest: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        self._lock: IO[str] = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is writing {output}; wait for it, or name another file with -o"
            ) from None
        present = [path for path in self.folder.iterdir() if path.name != "lock"]
        if changed := self._changed(manifest):
            if present:
                self.note = f"starting over: {changed}"
            for path in present:
                path.unlink()
            write_atomic(self.folder / MANIFEST, json.dumps(manifest))

    def _changed(self, manifest: dict[str, Any]) -> str:
        try:
            before = from_json((self.folder / MANIFEST).read_bytes(), {})
        except (OSError, ValueError):
            return f"{self.folder / MANIFEST} is damaged"
        names = [name for name in manifest if before.get(name) != manifest[name]]
        return f"changed since the interrupted command: {', '.join(names)}" if names else ""

    def find(self) -> int:
        """Find the finished blocks, and remove damaged ones. Return their number of rows."""
        from mlx_runtime.companions.serving.predictions.results import rows_of_part

        for path in self._files():
            number, _, rows = path.stem.partition("-")
            if int(rows) and rows_of_part(path) != int(rows):
                path.unlink()
            else:
                self.add(int(number), int(rows))
        return sum(self._finished.values())

    def add(self, number: int, rows: int) -> None:
        """Record that a block is finished."""
        self._finished[number] = rows
        if rows < self._block_rows:
            self._end = min(self._end, number)

    def missing(self) -> Iterator[int]:
        """Yield the numbers of the missing blocks in order, up to the last block, which is found meanwhile."""
        for number in itertools.count():
            if number > self._end:
                return
            if number not in self._finished:
                yield number

    def files(self) -> list[Path]:
        """Return the files of the parts that have rows, in order."""
        return [path for path in self._files() if not path.stem.endswith("-0")]

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.arrow") if not path.name.startswith("."))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Let another process use the folder, unless it is removed already. Without rows, it is removed."""
        if self._lock.closed:
            return
        if self.files():
            self._lock.close()
        else:
            self.remove()


def part_name(number: int, rows: int) -> str:
    """Return the name of the file of a block."""
    return f"{number:08d}-{rows}.arrow"


def code_digest(project: Path) -> str:
    """Return the SHA-256 of the Python files in `src` of a project."""
    digest = hashlib.sha256()
    for path in sorted((project / "src").rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(project)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
