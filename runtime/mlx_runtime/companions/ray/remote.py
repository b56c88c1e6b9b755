"""Commands that run on a cluster, whose storage this machine may lack: `mlx --on http://head:8265 xp ls`.

A command is a job; its output, files and exit code come back in `frames`.
"""

import codecs
import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_runtime.cli import options, xp
from mlx_runtime.cli.verbs import xp as verbs
from mlx_runtime.companions.jobs.checks import require
from mlx_runtime.companions.jobs.launching import JobState
from mlx_runtime.companions.ray import frames, remote_job
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.commands import refuse_unknown, typed_storage
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec, command_metadata, user_name
from mlx_runtime.companions.ray.preflight import check_upload
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, DATA_JOB
from mlx_runtime.errors import ClusterError, ConfigError, UsageError
from mlx_runtime.runs.queries.lookup import conf_value
from mlx_runtime.runs.records import LAUNCHED, LAUNCHED_FILE, launch_facts
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri
from mlx_runtime.storage.redaction import redact_override, secret_keys

DATA = ("launch", "logs", "ls", "rm", "show", "stop")
"""Commands of `mlx data` that read or change the storage. Of `mlx xp`, all do but `ray`; of `mlx train`, `launch`."""

POLL_S, POLLED_S = 0.15, 15.0
"""Interval for reading the log at first, and the time for it; then the log is followed, which lags by a second."""

OUTPUTS = ("-o", "--output")
"""Options whose values are files to write."""

WRITES = (["xp", "consolidate"], ["xp", "export"])
"""Commands that write files in any case."""

Write = Callable[[str, bytes], object]


class _EndedError(Exception):
    """The command has ended.

    Args:
        frame: the question, or the exit code.
    """

    def __init__(self, frame: frames.Frame) -> None:
        super().__init__(frame)
        self.frame = frame


def runs_there(words: Sequence[str]) -> bool:
    """Return True for commands that can run on a cluster."""
    group, command = [*words, "", ""][:2]
    if group == "xp":
        return command not in ("", "ray")
    return (group == "data" and command in DATA) or (group == "train" and command == "launch")


def run(words: Sequence[str], url: str | None) -> int:
    """Run a command on a cluster, and print what it prints. Return its exit code."""
    if not runs_there(words):
        raise UsageError(
            f"mlx {' '.join(words[:2])} does not support --on; mlx xp (except ray), mlx train launch, and mlx data "
            f"{', '.join(DATA)} do"
        )
    address = Address.parse(url, "--on")
    storage = typed_storage(words) or Settings.read().storage
    from_conf = not storage
    if from_conf:
        storage = conf_value("cfg.storage_path")
    is_relative = storage is not None and not is_uri(storage) and not storage.startswith("/")
    if is_relative and from_conf and any(word.startswith("/") for word in words):
        storage = None  # the command names a folder of the cluster
    elif is_relative:
        raise UsageError(
            f"the storage {storage} is a folder on this machine; set MLX_STORAGE to the folder on the cluster"
        )
    variables = {"MLX_STORAGE": storage} if storage else {}
    variables |= {"MLX_DEBUG": "1"} if Settings.read().debug else {}
    upload, added = _upload(words), dict[str, bytes]()
    if words[1] == "launch":  # from there; the last address wins
        added = {LAUNCHED_FILE: launch_facts()}
        variables[LAUNCHED] = LAUNCHED_FILE
        words = [*words[:2], f"--ray-address={address.url}", *words[2:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops the job
    dashboard = Dashboard.connect(address)
    if list(words[:2]) == ["xp", "board"]:
        return _board(dashboard, JobSpec(words, upload, variables))
    spec, files = JobSpec(words, upload, variables, added=added), Files(words, storage)
    try:
        end = _run(dashboard, spec, files.write)
        while end.kind == "ask":
            options.confirm(end.text)
            confirmed = variables | {frames.CONFIRMED: end.text}
            end = _run(dashboard, dataclasses.replace(spec, environment=confirmed), files.write)
    except KeyboardInterrupt:
        if words[1] != "launch":
            raise
        print("\nif the job was submitted, it keeps running", file=sys.stderr)
        return 130
    return end.code


def _upload(words: Sequence[str]) -> Upload:
    """Return the files that a command needs: conf.yaml, for an export also the code in `src`, and for a launch all of
    the folder, which must contain no secrets."""
    if words[1] != "launch":
        files = Upload.of(Path.cwd()).files if CONF.is_file() else ()
        needed = CONF.parent if list(words[:2]) == ["xp", "export"] else CONF
        return Upload(Path.cwd(), tuple(item for item in files if item[0].is_relative_to(needed)))
    folder = (DATA_JOB if words[0] == "data" else AN_EXPERIMENT).folder()
    refuse_unknown(words)
    upload = Upload.of(folder)
    require(check_upload(upload))
    try:
        written = list(secret_keys(parse_config(CONF.read_bytes(), environment=False))) if CONF.is_file() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {CONF}: {error}; fix it") from error
    hidden = {word: redact_override(word) for word in words}
    written += [shown.partition("=")[0].lstrip("+") for word, shown in hidden.items() if shown != word]
    if written:
        cure = "set it in the environment of the nodes, list its name in cfg.secrets=[NAME], and write ${oc.env:NAME}"
        raise UsageError(f"{', '.join(written)} would show in the dashboard and in run.json; {cure}")
    for note in upload.notes:
        print(f"note      {note}")
    return upload


def _board(dashboard: Dashboard, spec: JobSpec) -> int:
    """Serve TensorBoard here, with copies of the event files, which the job sends."""
    port = xp.group.commands["board"].make_context("board", [*spec.command[2:]]).params["port"]
    verbs.check_board(port)
    with tempfile.TemporaryDirectory(prefix="mlx-board-") as folder, contextlib.ExitStack() as stack:

        def write(path: str, content: bytes) -> None:
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as stream:
                stream.write(content)
            if not servers:
                servers.append(subprocess.Popen(verbs.board_command(folder, port)))
                stack.callback(servers[0].wait)
                stack.callback(servers[0].terminate)

        servers: list[subprocess.Popen[bytes]] = []
        return _run(dashboard, spec, write).code


class Files:
    """Writes the files that a command sends: those that the user has named. In the storage, the command writes them."""

    def __init__(self, words: Sequence[str], storage: str | None = None) -> None:
        pairs = [word.partition("=")[::2] for word in words] + [*itertools.pairwise(words)]
        values = [value for name, value in pairs if name in OUTPUTS]
        values += [word[2:] for word in words if word.startswith("-o")]  # -opage.html
        self._named = {os.path.normpath(value) for value in values if value}
        self._below: set[str] = set()
        self._begun: set[str] = set()
        self._bytes = 0
        for name in self._named:
            below = name != "." and not Path(name).is_absolute() and Path(name).parts[0] != ".."
            if below:
                self._below.add(name)
            elif not (storage and Path(name).is_relative_to(storage)):
                raise UsageError(
                    f"with --on, -o {name} must be a path below this folder, like -o out, or in the storage"
                )
        if not self._named and list(words[:2]) in WRITES and not {"-h", "--help"} & {*words}:
            raise UsageError(f"with --on, mlx {' '.join(words[:2])} needs -o PATH, where to write on this machine")
        inside = [name for name in self._named if Path(name).parts[0] == CONF.parts[0]]
        if inside and CONF.is_file():  # it is uploaded, and a link there
            raise UsageError(
                f"cannot write {inside[0]} into {CONF.parts[0]}, which the command reads; choose another path"
            )

    def _is_expected(self, path: str) -> bool:
        target = Path(path).resolve()
        return any(
            (path == name or path.startswith(f"{name}/")) and target.is_relative_to(Path(name).resolve())
            for name in self._below
        )

    def write(self, path: str, content: bytes) -> None:
        if not self._is_expected(path):
            raise ClusterError(f"the cluster sent a file that the command does not write: {path}")
        self._bytes += len(content)
        if self._bytes > remote_job.FILES_BYTES:
            raise ClusterError(f"the cluster sent more than {remote_job.FILES_BYTES / 1e6:.0f} MB of files")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("ab" if path in self._begun else "wb") as stream:
            stream.write(content)
        self._begun.add(path)


def _run(dashboard: Dashboard, spec: JobSpec, write: Write) -> frames.Frame:
    """Run a command, the words after `mlx`, as a job. Return its question, or its exit code."""
    user, key = re.sub(r"[^A-Za-z0-9]", "-", user_name()), f"mlx-{uuid.uuid4().hex}"
    prefix, metadata = f"mlx-command-{user}-", command_metadata()
    job = f"{prefix}{uuid.uuid4().hex[:8]}"
    command = ["python", "-u", "-m", remote_job.__name__, *spec.command]
    environment = {"MLX_ON": key, **spec.environment}
    dashboard.submit(job, dataclasses.replace(spec, command=command, environment=environment, metadata=metadata))
    reader = frames.Reader(key)
    decoders = {kind: codecs.getincrementaldecoder("utf-8")("replace") for kind in ("out", "err")}

    def read(text: str) -> None:
        for frame in reader.feed(text):
            if frame.kind in decoders:
                xp.echo_stored(decoders[frame.kind].decode(frame.data), err=frame.kind == "err")
            elif frame.kind == "file":
                write(frame.text, frame.data)
            else:
                raise _EndedError(frame)

    try:
        dashboard.forget_ended(prefix, metadata)
        state = _follow(dashboard, job, read)
    except _EndedError as end:
        return end.frame
    except BaseException:
        with contextlib.suppress(ClusterError):
            dashboard.stop(job)
        raise
    raise ClusterError(f"the command failed on {dashboard.address.url}: {reader.other or state.reason}")


def _follow(dashboard: Dashboard, job: str, read: Callable[[str], None]) -> JobState:
    """Read the log of a job until it ends, at first in short intervals."""
    seen, deadline = 0, time.monotonic() + POLLED_S
    while time.monotonic() < deadline and not dashboard.state(job, deadline).ended:
        time.sleep(POLL_S)
        text = ""
        with contextlib.suppress(ClusterError):  # the job has not begun, or the cluster is busy
            text = dashboard.log(job)
        read(text[seen:])
        seen = max(seen, len(text))
    return dashboard.follow(job, read, seen=seen)
