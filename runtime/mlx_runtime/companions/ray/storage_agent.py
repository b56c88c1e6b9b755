"""The agent for folders that only a cluster has: a job that answers the requests of `ClusterStorage`.

A client sends a request as a package (`PUT /api/packages/gcs/NAME`), and reads the reply as a log file of the agent's
node (`GET /api/v0/logs/file`). So both pass through the dashboard, and whoever may send them may run jobs anyway.
Requests and replies are a line of JSON, followed by data.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import LocalStorage, Stored
from mlx_runtime.storage.local import IrregularError

PROTOCOL = 2
"""Version of the requests. Clients start an agent of their own version if there is none."""

IDLE_S = 600.0
"""Time without requests after which the agent ends."""

BUSY_S, BUSY_PAUSE_S, PAUSE_S = 3.0, 0.005, 0.1
"""Pauses between looks for requests: short ones for some seconds after each request."""

REPLY_S = 120.0
"""Time after which a reply is removed; clients take theirs within milliseconds."""

INLINE_BYTES = 1 << 20
"""Maximum size of a file within a reply; larger ones are downloaded through a link."""

SAMPLE_BYTES = 1 << 16
"""Size of the beginning of data that decides whether it is compressed."""

THREADS = 8


class Folder(LocalStorage):
    """A folder of this node, as clients see it: no path and no link leads out of it."""

    def answer(self, call: str, *arguments: Any, data: bytes = b"") -> "tuple[Any, bytes | Path]":
        """Return the result of one of the methods in `CALLS`, and the data that follows it."""
        if call not in CALLS:
            raise StorageError(f"there is no call {call!r:.40}")
        done = CALLS[call](self, *arguments, *([data] if call in WRITES else []))
        return done if isinstance(done, tuple) else (done, b"")

    def entries(self, path: str, recursive: bool) -> Any:
        return [_plain(item) for item in self.listed(*filter(None, [self._inside(path)]), recursive=recursive)]

    def entry(self, path: str) -> Any:
        found = self.find(*filter(None, [self._inside(path)]))
        return _plain(found) if found is not None else None

    def content(self, path: str) -> "tuple[Any, bytes | Path]":
        """Return the size of a file, and its content or, if it is large, its path."""
        with self.open(self._inside(path)) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > INLINE_BYTES:
                return size, Path(os.path.realpath(self.of(path)))
            content = stream.read()
        return len(content), content

    def put(self, path: str, data: bytes) -> None:
        self._make_room(path)
        self.write(data, path)

    def extend(self, path: str, data: bytes) -> None:
        """Add a part to a file that the client then moves to its final name."""
        self._make_room(path)
        with open(self.of(self._inside(path)), "ab") as stream:  # noqa: PTH123
            stream.write(data)

    def put_new(self, path: str, data: bytes) -> bool:
        self._make_room(path)
        return self.create_exclusively(data, path)

    def claim(self, path: str) -> bool:
        self._make_room(path)
        return self.claim_folder(path)

    def rename(self, old: str, new: str) -> None:
        self._make_room(new)
        self.move(self._inside(old, entry=True), new)

    def discard(self, path: str) -> None:
        self.remove_file(self._inside(path, entry=True))

    def discard_folder(self, path: str) -> None:
        self.remove_folder(*filter(None, self._inside(path, entry=True).split("/")))

    def _make_room(self, path: str) -> None:
        above, parent = Path(self.of(self._inside(path, entry=True))).parent, Path(self.path).parent
        if not parent.is_dir():  # a mount that is missing here, or a typing error
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {parent} on {socket.gethostname()}")
        above.mkdir(parents=True, exist_ok=True)

    def _inside(self, path: str, *, entry: bool = False) -> str:
        """Return a path below this folder; raise OSError if it, or a link in it, leads elsewhere.

        With `entry`, the last part may be a link.
        """
        if path and not stays_below(path):
            raise IrregularError(errno.EINVAL, "this is not a path in the storage", path)
        if leads := self._leads_out(path.rpartition("/")[0] if entry else path):
            raise PermissionError(errno.EACCES, f"a link leads out of the storage, to {leads}", self.of(path))
        return path

    def _leads_out(self, path: str) -> str | None:
        real = os.path.realpath(self.of(path) if path else self.path)
        return None if real == self.path or real.startswith(f"{self.path}/") else real


CALLS: dict[str, Callable[..., Any]] = {
    "entries": Folder.entries,
    "entry": Folder.entry,
    "content": Folder.content,
    "put": Folder.put,
    "extend": Folder.extend,
    "put_new": Folder.put_new,
    "claim": Folder.claim,
    "rename": Folder.rename,
    "discard": Folder.discard,
    "discard_folder": Folder.discard_folder,
}

WRITES = ("put", "extend", "put_new")
"""Calls with data."""


def _plain(item: Stored) -> list[Any]:
    return [item.path, item.size_bytes, item.modified_s, item.is_file]


def unpack(message: bytes) -> tuple[Any, bytes]:
    """Return the JSON and the data of a request or a reply."""
    head, _, data = message.partition(b"\n")
    head = json.loads(head)
    return head, zlib.decompress(data) if head.get("packed") else data


def pack(head: dict[str, Any], data: bytes = b"") -> bytes:
    """Return a request or a reply."""
    sample = data[:SAMPLE_BYTES]
    packed = len(zlib.compress(sample, 1)) < 0.8 * len(sample)  # weights would take a second for 16 MB, for nothing
    return json.dumps(head | {"packed": packed}).encode() + b"\n" + (zlib.compress(data, 1) if packed else data)


def reply_to(message: bytes) -> tuple[dict[str, Any], "bytes | Path"]:
    """Return the reply to a request."""
    try:
        head, data = unpack(message)
        if head["protocol"] != PROTOCOL:
            raise StorageError(f"the agent answers requests of version {PROTOCOL}, not {head['protocol']}")
        done, content = Folder(head["root"]).answer(head["call"], *head["arguments"], data=data)
    except OSError as error:
        kind = "irregular" if isinstance(error, IrregularError) else "os"
        return {"error": kind, "errno": error.errno, "text": error.strerror or short_message(error)}, b""
    except Exception as error:  # whatever it is, it is an error of one request
        return {"error": "storage", "text": short_message(error)}, b""
    return {"done": done}, content


class Agent:
    """Takes requests and writes replies, until none has come for `IDLE_S`.

    Args:
        job: id of this job, with which the names of requests begin.
        replies: folder for replies, in the folder of this node's logs.
    """

    def __init__(self, job: str, replies: Path) -> None:
        self._job, self._replies = job, replies

    def serve(self) -> None:
        from mlx_runtime.companions.ray.private_gcs import Packages

        packages = Packages(os.environ["RAY_ADDRESS"], f"{self._job}_")
        last = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            while (silent_s := time.monotonic() - last) < IDLE_S:
                for name, message in packages.take():
                    pool.submit(self._answer, name, message)
                    last = time.monotonic()
                    silent_s = 0.0
                if silent_s > BUSY_S:
                    self._clean_up()
                time.sleep(BUSY_PAUSE_S if silent_s < BUSY_S else PAUSE_S)

    def _answer(self, name: str, message: bytes) -> None:
        head, content = reply_to(message)
        if isinstance(content, Path):
            head["file"] = f"{name}.content"
            (self._replies / head["file"]).symlink_to(content)
        hidden = self._replies / f".{name}"
        hidden.write_bytes(pack(head, content if isinstance(content, bytes) else b""))
        hidden.rename(self._replies / name)

    def _clean_up(self) -> None:
        for file in self._replies.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - file.lstat().st_mtime > REPLY_S:
                    file.unlink()


def main() -> None:
    job = os.environ["MLX_JOB"]
    replies = Path("/proc/self/fd/1").readlink().parent / job  # this job's output is a file in the folder of logs
    replies.mkdir(mode=0o700, exist_ok=True)
    print(f"answering requests for storage, until none has come for {IDLE_S / 60:.0f} minutes", flush=True)
    try:
        Agent(job, replies).serve()
    finally:
        shutil.rmtree(replies, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # Ray's threads would take a while to end


if __name__ == "__main__":
    main()
