"""The servers on this machine: a record and a control socket each, which only their user can open."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, UsageError, short_message
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import COUNT, TEXT, TIME, from_json, mapping_of, now
from mlx_runtime.storage.files import to_json
from mlx_runtime.storage.leases import is_alive, this_process
from mlx_runtime.storage.local import read_regular, write_atomic

RECORD = {
    "port": COUNT,
    "url": TEXT,
    "pid": COUNT,
    "host": TEXT,
    **dict.fromkeys(("boot", "pid_started"), TEXT.or_null()),
    "heartbeat": TIME,
    "socket": TEXT,
    "log": TEXT,
    "models": mapping_of(TEXT),
}
"""Types of the fields in the record of a server."""

ANSWER_S = 5.0
STOP_S = 60.0
UPDATE_S = 600.0
MAX_MESSAGE = 64 << 10


def servers_folder() -> Path:
    """Return the folder with the records of this user's servers."""
    folder = Settings.read().cache / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class Control:
    """Announces a server, and answers the commands of other processes of its user.

    Args:
        record: `port`, `url` and `log` of the server.
        models: returns the titles of its models by name, and other fields to show.
        actions: called with the fields of a message, by its field `action`; the result is sent back. An MlxError is
            the answer of a command that cannot be carried out.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        models: Callable[[], Mapping[str, str]],
        actions: Mapping[str, Callable[[Mapping[str, Any]], str]],
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mlx-serve-"))  # mode 0700; a path in the cache could be too long
        self._path = self._folder / "control"
        self._models, self._actions = models, actions
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._listener.listen(8)
        self._file = servers_folder() / f"{record['port']}-{os.getpid()}.json"
        self._record = this_process() | {"heartbeat": now(), "socket": str(self._path)} | dict(record)
        self.write()
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    def write(self) -> None:
        """Write the record anew, with the present models."""
        write_atomic(self._file, to_json(self._record | {"models": dict(self._models())}))

    def close(self) -> None:
        """Remove the record and the socket."""
        self._file.unlink(missing_ok=True)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(ANSWER_S)
            message = json.loads(_receive(connection))
            connection.settimeout(UPDATE_S)
            try:
                answer = {"text": self._actions[message["action"]](message)}
            except MlxError as error:
                answer = {"error": short_message(error)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {short_message(error)}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")


def servers() -> list[dict[str, Any]]:
    """Return the records of the servers that answer, by port. Records of those that have ended are removed."""
    found = []
    for file, record in _records():
        try:
            status = ask(record, {"action": "status"}, ANSWER_S)
        except MlxError:
            if not is_alive(record):
                file.unlink(missing_ok=True)
            continue
        found.append(record | {"status": status})
    return sorted(found, key=lambda record: int(record["port"]))


def find(port: int | None, model: str | None = None) -> dict[str, Any]:
    """Return the server of a port, or the only one, of a model if that is given.

    Raises:
        UsageError: there is none, or several.
    """
    known = servers()
    chosen = [
        record for record in known if port in (None, record["port"]) and (model is None or model in record["models"])
    ]
    if len(chosen) == 1:
        return chosen[0]
    if not known:
        raise UsageError("no server is running; start one: mlx serve run NAME")
    listing = "; ".join(f"{record['port']} serves {', '.join(record['models'])}" for record in known)
    if not chosen:
        wanted = " ".join([f"serves {model!r}"] * (model is not None) + [f"at port {port}"] * (port is not None))
        raise UsageError(f"no server {wanted}; {listing}")
    raise UsageError(f"which server? Add --port with one of these: {listing}")


def ask(record: Mapping[str, Any], message: Mapping[str, Any], timeout_s: float) -> str:
    """Send a message to a server, and return its answer.

    Raises:
        MlxError: it does not answer, or the command cannot be carried out.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(record["socket"])
            connection.sendall(json.dumps(dict(message)).encode() + b"\n")
            answer = json.loads(_receive(connection))
    except (OSError, ValueError) as error:
        raise MlxError(f"the server at port {record['port']} does not answer: {short_message(error)}") from error
    if "error" in answer:
        raise MlxError(str(answer["error"]))
    return str(answer["text"])


def wait_for_end(record: Mapping[str, Any]) -> None:
    """Wait until a server has ended. Raises MlxError if it does not."""
    until = time.monotonic() + STOP_S
    while is_alive(record):
        if time.monotonic() > until:
            raise MlxError(f"the server at port {record['port']} still answers requests; process {record['pid']}")
        time.sleep(0.05)


def _records() -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(servers_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, MlxError):
            record = from_json(read_regular(file, MlxError), RECORD, needs=tuple(RECORD))
            if record["host"] == socket.gethostname():  # several machines may share a home folder
                yield file, record


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece or len(data) > MAX_MESSAGE:
            raise ValueError("the message is cut off")
        data += piece
    return data
