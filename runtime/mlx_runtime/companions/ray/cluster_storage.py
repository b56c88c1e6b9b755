"""Folders of functions with `address=` that only a cluster has: `ray+http://head:8265/ceph/runs` is `/ceph/runs` there.

Files are read and written by an agent there (see `storage_agent`), through the cluster's dashboard.
"""

import contextlib
import getpass
import io
import re
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx_runtime
from mlx_runtime.companions.ray import storage_agent
from mlx_runtime.companions.ray.addresses import Address, is_named
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.errors import ClusterError, StorageError, printable
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import Storage, Stored
from mlx_runtime.storage.local import IrregularError

SCHEME = "ray+"
"""Beginning of the URIs, before the URL of the dashboard. If that has a path, `//` precedes the path of the folder."""

START_S = 90.0  # maximum time until an agent runs, with a busy cluster or slow packages
REPLY_S = 120.0  # maximum time until a running agent replies
PAUSES_S = (0.008, 0.012, 0.02, 0.04, 0.08, 0.15)  # between looks for a reply; then the last one
CHECK_S = 2.0  # interval for checking the agent while waiting
PART_BYTES = 16 << 20  # parts in which larger files are written; Ray accepts 100 MiB

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

NOT_REPEATED = {"extend", "put_new", "claim", "rename"}
"""Calls that may fail, or do harm, if they are repeated after the agent has ended in the middle of one."""

READS = {"entries", "entry", "content"}

_named: dict[str, str] = {}
"""Folders that this process reaches through a cluster, and the URLs of the clusters, which the user has named."""


def split(uri: str) -> tuple[str, str]:
    """Return the URL of the dashboard and the path of the folder on the cluster.

    Raises:
        StorageError: One of them is missing.
    """
    scheme, _, rest = uri.removeprefix(SCHEME).partition("://")
    host, mark, path = rest.partition("//") if "//" in rest else rest.partition("/")
    if scheme not in ("http", "https") or not host or not mark:
        raise StorageError(f"cannot reach {uri}: write {SCHEME}http://HEAD:8265/FOLDER")
    return f"{scheme}://{host}", f"/{path}"


def uri_of(url: str, path: str) -> str:
    """Return the URI of a folder on a cluster."""
    return f"{SCHEME}{url}{'/' * ('/' in url.partition('://')[2])}{path}"


def path_there(location: str) -> str:
    """Return the path on the cluster of a folder that is reached through it; other folders and URIs are unchanged."""
    return split(location)[1] if location.startswith(SCHEME) else location


def cluster_of(run: RunFolder) -> str:
    """Return the URL of the cluster of a run that is reached through it."""
    return split(run.location)[0]


def split_path(overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the path in the last `cfg.storage_path=` of overrides, empty without one, and the other overrides."""
    typed = [item for item in overrides if item.lstrip("+").startswith("cfg.storage_path=")]
    path = typed[-1].partition("=")[2].strip("'\"") if typed else ""
    return path, tuple(item for item in overrides if item not in typed)


def reached(path: str, address: str) -> str:
    """Return the URI of a folder that only the cluster at an address has.

    A folder that this machine has, or that is not an absolute path, is returned unchanged, and so is any folder in a
    job of a cluster. A note on stderr names the cluster.
    """
    if not path.startswith("/") or Settings.read().job or Path(path).exists():
        return path
    found = Address.parse(address)
    if _named.get(path) != found.url:
        _named[path] = found.url
        print(printable(f"storage   {path} on {found.url}, as this machine lacks it", one_line=True), file=sys.stderr)
    return uri_of(found.url, path)


class ClusterStorage(Storage):
    """A folder on the head node of a cluster."""

    def __init__(self, root: str) -> None:
        url, path = split(root)
        super().__init__(root, path)
        self._client = _client_of(url)

    def __reduce__(self) -> tuple[type["ClusterStorage"], tuple[str]]:  # the connection stays in its process
        return ClusterStorage, (self.root,)

    def listed(self, *parts: str, recursive: bool = False) -> list[Stored]:
        return [Stored(*item) for item in self._call("entries", "/".join(parts), recursive)]

    def find(self, *parts: str) -> Stored | None:
        found = self._call("entry", "/".join(parts))
        return Stored(*found) if found is not None else None

    def open(self, *parts: str) -> Any:
        _, content = self._client.call(self.path, "content", "/".join(parts))
        return io.BytesIO(content) if isinstance(content, bytes) else content

    def create(self, *parts: str) -> BinaryIO:
        return cast(BinaryIO, _NewFile(lambda content: self._put(content, *parts)))

    def create_exclusively(self, data: bytes, *parts: str) -> bool:
        return bool(self._call("put_new", "/".join(parts), data=data))

    def claim_folder(self, *parts: str) -> bool:
        return bool(self._call("claim", "/".join(parts)))

    def remove_file(self, *parts: str) -> None:
        self._call("discard", "/".join(parts))

    def remove_folder(self, *parts: str) -> None:
        self._call("discard_folder", "/".join(parts))

    def _call(self, call: str, *arguments: Any, data: bytes = b"") -> Any:
        return self._client.call(self.path, call, *arguments, data=data)[0]

    def _put(self, content: memoryview, *parts: str) -> None:
        if len(content) <= PART_BYTES:
            self._call("put", "/".join(parts), data=bytes(content))
            return
        *above, name = parts
        hidden = "/".join([*above, f".{name}.{uuid.uuid4().hex[:8]}"])
        try:
            for start in range(0, len(content), PART_BYTES):
                self._call("extend", hidden, data=bytes(content[start : start + PART_BYTES]))
            self._call("rename", hidden, "/".join(parts))
        except BaseException:
            with contextlib.suppress(OSError):
                self._call("discard", hidden)
            raise


class _NewFile(io.BytesIO):
    """A file that is written when it is closed, unless an exception has interrupted its writer."""

    def __init__(self, put: Callable[[memoryview], object]) -> None:
        super().__init__()
        self._put = put

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close() if error is None else super().close()

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()  # first: it is not tried again when this object is deleted
        self._put(memoryview(content))


class _AgentEndedError(Exception):
    """The job of the agent has ended, or the cluster has forgotten it."""


class _Client:
    """Sends requests to the agent of this user on a cluster, and starts it if there is none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._dashboard: Dashboard | None = None
        self._agent: tuple[str, str] | None = None  # ids of its job and of its node

    def call(self, root: str, call: str, *arguments: Any, data: bytes = b"") -> tuple[Any, Any]:
        """Return the result of a call, and its data: bytes, or an open file if they are large."""
        head = {"protocol": storage_agent.PROTOCOL, "root": root, "call": call, "arguments": arguments}
        title = "/".join([root, *filter(None, [str(arguments[0])])])
        for attempt in (1, 2):
            dashboard, job, node = self._connect()
            try:
                return self._exchange(dashboard, job, node, storage_agent.pack(head, data))
            except _AgentEndedError:
                with self._lock:
                    self._agent = None
                if attempt == 2 or call in NOT_REPEATED:
                    break
            except ClusterError as error:
                unknown = "" if call in READS else ", which may have been changed or not"
                raise ConnectionError(f"{error}: in the middle of a request for {title}{unknown}") from error
        raise ConnectionError(f"the agent on {self.url} ended in the middle of a request for {title}; try again")

    def _exchange(self, dashboard: Dashboard, job: str, node: str, message: bytes) -> tuple[Any, Any]:
        name = f"{job}_{uuid.uuid4().hex}"
        dashboard.put_package(name, message)
        asked = checked = time.monotonic()
        for number in range(sys.maxsize):
            time.sleep(PAUSES_S[min(number, len(PAUSES_S) - 1)])
            reply = io.BytesIO()
            if dashboard.log_file(node, f"{job}/{name}", reply):
                break
            now = time.monotonic()
            if now - checked > CHECK_S:
                checked = now
                if (facts := dashboard.job_facts(job)) is None or facts["status"] != "RUNNING":
                    raise _AgentEndedError
            if now - asked > REPLY_S:
                raise ClusterError(f"the agent {job} on {self.url} did not reply within {REPLY_S:.0f} s")
        head, content = storage_agent.unpack(reply.getvalue())
        _raise_error(head)
        if "file" not in head:
            return head["done"], content
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        if (size := dashboard.log_file(node, f"{job}/{head['file']}", file)) < head["done"]:
            raise ClusterError(f"{self.url} has sent {size:,} of {head['done']:,} bytes")
        file.seek(0)
        return head["done"], file

    def _connect(self) -> tuple[Dashboard, str, str]:
        """Return the dashboard, and the ids of the agent's job and node."""
        with self._lock:
            if self._dashboard is None:
                self._refuse_untrusted()
                self._dashboard = Dashboard.connect(Address(self.url, "the storage"))
            if self._agent is None:
                self._agent = self._find(self._dashboard) or self._start(self._dashboard)
            return self._dashboard, *self._agent

    def _refuse_untrusted(self) -> None:
        """Raise StorageError if only a file, like the conf.yaml of a run, names the cluster: it would get the token."""
        typed = (Settings.read().storage or "").startswith(f"{SCHEME}{self.url}/")
        if not typed and self.url not in _named.values() and not is_named(self.url):
            raise StorageError(f"you have not named the cluster {self.url}; if it is yours: RAY_ADDRESS={self.url}")

    @property
    def _metadata(self) -> dict[str, str]:
        version = f"{mlx_runtime.__version__}, protocol {storage_agent.PROTOCOL}"
        return {"mlx": "storage", "user": getpass.getuser(), "version": version}

    def _find(self, dashboard: Dashboard) -> tuple[str, str] | None:
        ended = []
        for facts in dashboard.jobs():
            if facts.get("metadata") == self._metadata:
                if facts["status"] == "RUNNING" and facts["driver_node_id"]:
                    return facts["submission_id"], facts["driver_node_id"]
                ended += [facts["submission_id"]] * (facts["status"] in ENDED)
        for job in ended:  # the user has not submitted them
            dashboard.forget(job)
        return None

    def _start(self, dashboard: Dashboard) -> tuple[str, str]:
        user = re.sub(r"[^A-Za-z0-9]", "-", getpass.getuser())
        job, deadline = f"mlx-storage-{user}-{uuid.uuid4().hex[:8]}", time.monotonic() + START_S
        with tempfile.TemporaryDirectory() as empty:
            command = ["python", "-u", "-m", storage_agent.__name__]
            dashboard.submit(job, JobSpec(command, Upload.of(Path(empty)), {}, self._metadata))
        while time.monotonic() < deadline:
            facts = dashboard.job_facts(job) or {}
            if facts.get("status") == "RUNNING" and facts.get("driver_node_id"):
                return job, str(facts["driver_node_id"])
            if facts.get("status") in ENDED:
                reason = last_lines(dashboard.log(job), 1).strip() or last_lines(facts.get("message") or "", 1)
                raise ClusterError(f"the agent for storage on {self.url} failed: {reason}")
            time.sleep(0.1)
        raise ClusterError(f"{self.url} has not started the agent for storage within {START_S:.0f} s: the job {job}")


def _raise_error(head: dict[str, Any]) -> None:
    """Raise the error that a reply describes."""
    match head.get("error"):
        case "os":
            raise OSError(head["errno"], head["text"]) if head["errno"] else OSError(head["text"])
        case "irregular":
            raise IrregularError(head["errno"], head["text"])
        case "storage":
            raise StorageError(head["text"])


_clients: dict[str, _Client] = {}
"""The connections of this process, by the URL of the dashboard."""


def _client_of(url: str) -> _Client:
    return _clients.setdefault(url, _Client(url))
