"""A small Hugging Face Hub on 127.0.0.1, with the HTTP API that `huggingface_hub` uses.

Repositories of models with commits, LFS uploads, downloads by revision, tokens, and injected faults.
It lacks Xet: clients need `HF_HUB_DISABLE_XET=1`, which is one of `Hub.variables`.

    with Hub() as hub:
        hub.faults = Faults(0.1)
        subprocess.run([...], env=os.environ | hub.variables("alice"))
        assert hub.files("alice/digits")["README.md"]
"""

import base64
import hashlib
import itertools
import json
import random
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

LFS_BYTES = 4096
"""Size from which files are stored in LFS, so that small checkpoints are, too."""

LFS_NAMES = re.compile(r".*\.(pt|safetensors|zip|bin)|.*tfevents.*")


REFUSALS = {
    "429": (b"slow down", {"Retry-After": "0"}),
    "409": (b"{}", {"Content-Type": "application/json"}),
    "403": (b"{}", {"Content-Type": "application/json"}),
    "503": (b"<html>unavailable</html>", {"Content-Type": "text/html"}),
}
"""Content and headers of injected faults, by their status."""


@dataclass
class Commit:
    sha: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: list[Commit]

    def at(self, revision: str) -> Commit | None:
        """Return a commit of `main`, by its name or by a prefix of its hash."""
        if revision in ("main", "refs/heads/main"):
            return self.commits[-1]
        return next((commit for commit in self.commits if len(revision) > 6 and commit.sha.startswith(revision)), None)


@dataclass
class Faults:
    """Which requests fail, and how: a fraction of all, or those that `when(method, path)` selects."""

    fraction: float = 0.0
    kinds: tuple[str, ...] = ("429", "503", "cut before", "cut after")
    when: Callable[[str, str], bool] = lambda method, path: True
    limit: int | None = None  # on the number of faults
    seed: int = 0
    injected: list[tuple[str, str, str]] = field(default_factory=list)  # kind, method and path of each
    _random: random.Random = field(default_factory=random.Random)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def draw(self, method: str, path: str) -> str | None:
        with self._lock:
            if self.limit is not None and len(self.injected) >= self.limit:
                return None
            if not self.when(method, path) or self._random.random() >= self.fraction:
                return None
            kind = self.kinds[len(self.injected) % len(self.kinds)]
            self.injected.append((kind, method, path))
            return kind


class Hub:
    """The server. Tokens are `token-<user>`, and `read-<user>` for one that may only read.

    Attributes:
        faults: which requests fail.
        requests: method and path of all requests so far.
        uploads: hash of each LFS object in the order of their uploads, with repetitions.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self.requests: list[tuple[str, str]] = []
        self.uploads: list[str] = []
        self.repositories: dict[str, Repository] = {}  # by `models/user/name`
        self.objects: dict[str, bytes] = {}
        self.delay_s = 0.0  # before each answer
        self.lock = threading.RLock()
        self._shas = itertools.count()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def variables(self, user: str | None = "alice", *, token: str | None = None) -> dict[str, str]:
        """Return the environment of a client with the token of a user; with None, without any."""
        found = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        found["HF_HUB_DISABLE_UPDATE_CHECK"] = "1"
        return found | ({"HF_TOKEN": token or f"token-{user}"} if token or user else {"HF_TOKEN": ""})

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def create(self, name: str, files: Mapping[str, bytes] | None = None, *, private: bool = True) -> Repository:
        """Create a repository with a first commit."""
        repository = self.repositories[f"models/{name}"] = Repository(private, [])
        self.commit(repository, "initial commit", {".gitattributes": b"*.pt filter=lfs\n", **(files or {})})
        return repository

    def commit(self, repository: Repository, title: str, files: dict[str, bytes]) -> Commit:
        sha = hashlib.sha1(f"{next(self._shas)} {title}".encode()).hexdigest()
        repository.commits.append(Commit(sha, title, files))
        return repository.commits[-1]

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the content of all files of a repository."""
        commit = self.repositories[f"models/{name}"].at(revision)
        assert commit is not None, revision
        return commit.files

    def commits(self, name: str) -> list[str]:
        """Return the titles of all commits after the first one, oldest first."""
        return [commit.title for commit in self.repositories[f"models/{name}"].commits[1:]]

    def upload_folder(self, name: str, folder: Path, *, private: bool = False) -> str:
        """Put the files of a folder into a new repository. Return the hash of the commit."""
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        return self.create(name, files, private=private).commits[-1].sha


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client has gone


class _Error(Exception):
    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class _Handler(BaseHTTPRequestHandler):
    """Answers one request after another on a connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - names of http.server

    def _answer(self) -> None:
        self.path, _, query = self.path.partition("?")
        self.query = {name: values[0] for name, values in urllib.parse.parse_qs(query).items()}
        self.hub.requests.append((self.command, self.path))
        kind = self.hub.faults.draw(self.command, self.path)
        if kind == "cut before":
            self._cut()
            return
        body = self._body()
        time.sleep(self.hub.delay_s)
        if kind in REFUSALS:
            content, headers = REFUSALS[kind]
            self._send(int(kind), content, headers)
            return
        try:
            with self.hub.lock:
                status, content, headers = self._route(body)
        except _Error as error:
            status, content = error.status, json.dumps({"error": str(error)}).encode()
            headers = {"X-Error-Message": str(error), "Content-Type": "application/json", **error.headers}
            if error.code:
                headers["X-Error-Code"] = error.code
        if kind == "cut after":
            self._cut()
            return
        self._send(status, content, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # What the API does

    def _route(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        for method, pattern, action in ROUTES:
            match = re.fullmatch(pattern, self.path)
            if match is not None and self.command in method.split():
                words = {name: urllib.parse.unquote(word) for name, word in match.groupdict(default="").items()}
                return action(self, body, **words)
        raise _Error(404, f"no such page: {self.command} {self.path}")

    def _user(self) -> str | None:
        """Return the user of the token, or None without one."""
        found = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not found:
            return None
        match = re.fullmatch(r"(?:token|read)-(\w+)", found)
        if match is None:
            raise _Error(401, "Invalid credentials in Authorization header")
        return match[1]

    def _repository(self, name: str, *, write: bool = False) -> Repository:
        user, found = self._user(), self.hub.repositories.get(f"models/{name}")
        owns = user is not None and name.startswith(f"{user}/")
        if found is None or (found.private and not owns):
            raise _Error(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and (not owns or self.headers["Authorization"].startswith("Bearer read-")):
            raise _Error(403, "Forbidden: you must use a write token to upload to a repository")
        return found

    def _commit(self, repository: Repository, revision: str) -> Commit:
        found = repository.at(revision or "main")
        if found is None:
            raise _Error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def whoami(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        user = self._user()
        if user is None:
            raise _Error(401, "Invalid username or password.")
        return _json({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    def create(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        asked, user = json.loads(body), self._user()
        if user is None:
            raise _Error(401, "Invalid username or password.")
        name = f"{asked['organization'] or user}/{asked['name']}"
        if not name.startswith(f"{user}/") or self.headers["Authorization"].startswith("Bearer read-"):
            raise _Error(
                403, f"You don't have the rights to create a model under the namespace {asked['organization']!r}"
            )
        if f"models/{name}" in self.hub.repositories:
            return _json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.create(name, private=private)
        return _json({"url": f"{self.hub.url}/{name}", "name": name})

    def validate(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        import yaml

        _, mark, rest = json.loads(body)["content"].partition("---\n")
        try:
            yaml.safe_load(rest.partition("\n---\n")[0]) if mark else None
        except yaml.YAMLError as error:
            return _json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return _json({"errors": [], "warnings": []})

    def info(self, body: bytes, name: str, revision: str = "") -> tuple[int, bytes, dict[str, str]]:
        found = self._repository(name)
        commit = self._commit(found, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        facts = {"id": name, "sha": commit.sha, "private": found.private, "siblings": siblings, "tags": []}
        return _json(facts | {"downloads": 0, "likes": 0, "gated": False, "disabled": False})

    def tree(self, body: bytes, name: str, revision: str, path: str = "") -> tuple[int, bytes, dict[str, str]]:
        files = self._commit(self._repository(name), revision).files
        prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        below = {item: content for item, content in files.items() if item.startswith(prefix)}
        if prefix and not below:
            raise _Error(404, f"{path} does not exist", "EntryNotFound")
        entries = {item: _entry(item, content) for item, content in below.items()}
        if self.query.get("recursive", "").lower() != "true":
            folders = {prefix + item.removeprefix(prefix).partition("/")[0] for item in below}
            entries = {
                item: entries.get(item, {"type": "directory", "path": item, "oid": "", "size": 0}) for item in folders
            }
        return _json([entries[item] for item in sorted(entries)])

    def preupload(self, body: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        files = self._commit(self._repository(name, write=True), revision).files
        modes = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            large = asked["size"] >= LFS_BYTES or LFS_NAMES.fullmatch(path)
            mode = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in files:
                mode["oid"] = hashlib.sha256(files[path]).hexdigest() if large else _git_hash(files[path])
            modes.append(mode)
        return _json({"files": modes})

    def batch(self, body: bytes, name: str) -> tuple[int, bytes, dict[str, str]]:
        self._repository(name, write=True)
        objects = []
        for asked in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            missing = asked["oid"] not in self.hub.objects
            objects.append({"oid": asked["oid"], "size": asked["size"]} | ({"actions": action} if missing else {}))
        return _json({"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str) -> tuple[int, bytes, dict[str, str]]:
        self.hub.uploads.append(oid)
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Error(400, "the content does not have this hash")
        self.hub.objects[oid] = body
        return 200, b"", {}

    def commit(self, body: bytes, name: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        found = self._repository(name, write=True)
        head, *operations = map(json.loads, body.splitlines())
        parent = head["value"].get("parentCommit")
        if parent is not None and not found.commits[-1].sha.startswith(parent):
            raise _Error(412, "A commit has happened since. Please refresh and try again.")
        files = dict(found.commits[-1].files)
        for operation in operations:
            value = operation["value"]
            path = value["path"]
            match operation["key"]:
                case "file":
                    files[path] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.objects:
                        raise _Error(400, f"the object of {path} was not uploaded")
                    files[path] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    if path not in files:
                        raise _Error(404, "A file with this name doesn't exist", "EntryNotFound")
                    del files[path]
        made = self.hub.commit(found, head["value"]["summary"], files)
        return _json({"success": True, "commitUrl": f"{self.hub.url}/{name}/commit/{made.sha}", "commitOid": made.sha})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        commit = self._commit(self._repository(name), revision)
        if path not in commit.files:
            raise _Error(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{_git_hash(content)}"', "Accept-Ranges": "bytes"}
        if len(content) >= LFS_BYTES or LFS_NAMES.fullmatch(path):
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return 200, content, headers
        first, last = int(span[1]), int(span[2] or len(content) - 1)
        return 206, content[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}


ROUTES: tuple[tuple[str, str, Callable[..., tuple[int, bytes, dict[str, str]]]], ...] = (
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", r"/api/models/(?P<name>[^/]+/[^/]+)", _Handler.info),
    ("GET", r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)", _Handler.info),
    (
        "GET",
        r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?P<path>/.*)?",
        _Handler.tree,
    ),
    ("POST", r"/api/models/(?P<name>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", r"/api/models/(?P<name>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    (
        "GET HEAD",
        r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        _Handler.resolve,
    ),
)
"""Methods, path and action of each part of the API."""


def _json(value: Any, status: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
    if len(content) >= LFS_BYTES or LFS_NAMES.fullmatch(path):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
