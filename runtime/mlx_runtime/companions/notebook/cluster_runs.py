"""Runs on a remote cluster, as seen from Python: launched as jobs, and followed through the dashboard.

The driver is a job (`cluster_job`), in whose log the events of the run are frames. So it does not depend on this
process, and any process that reaches the dashboard can follow it.
"""

import base64
import contextlib
import io
import json
import multiprocessing
import pickle
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.companions.notebook.background import RunJob, load_bound_config
from mlx_runtime.config.projects import project_module
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import ClusterError, MlxError, UsageError, short_message
from mlx_runtime.events import Event, FunctionReturned, RunEnded, RunInfo, RunStarted, decode
from mlx_runtime.runs.queries.lookup import storage_path
from mlx_runtime.runs.records import LAUNCHED, LAUNCHED_FILE, launch_facts
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import from_json
from mlx_runtime.storage.files import size_text, split_options

MOST_BYTES = 200_000_000
"""Maximum size of all values that a function returns."""

END = "End"
"""Kind of the last event, with `status`, `metrics`, `best` and `error`, the text of an error or null."""

KEY = "MLX_ON"
"""Variable with the key of the frames."""

JOB = f"{__package__}.cluster_job"
"""Module of the job."""

LAUNCH = "launch"

LAUNCH_S = 1800.0
"""Time in which a run has to be launched from a cluster, whose nodes may have to start first."""

SENT = Path("runs", "sent")
"""Folder of an upload with what a launch from the cluster needs: `inputs`, and `ASKED`. No job gets a folder `runs`."""

ASKED = "asked.json"


LOST = "LOST"
"""Status of a run whose cluster does not answer any more. It may still train."""


@dataclass
class ClusterRun:
    """A run on a cluster, in place of the process of a run on this machine.

    Args:
        dashboard: the cluster.
        job: id of the job on it.
        key: key of the frames in its log.
        folder: folder or URI of the run, which only the cluster may have.
        function: path of the function that it calls, or an empty string.
    """

    dashboard: Any
    job: str
    key: str
    folder: str
    function: str = ""

    def follow(self) -> "ClusterRun":
        """Follow the run in a thread, which ends with this process."""
        self.ended: RunEnded | None = None
        self.events, self._events = multiprocessing.Pipe(duplex=False)
        self._asked = False
        threading.Thread(target=self._follow, name="cluster run", daemon=True).start()
        return self

    def read(self) -> Iterator[Event]:
        """Yield the events that have arrived, except the end of the run, which `ended` holds."""
        while self.ended is None and self.events.poll():
            event = self.events.recv()
            if isinstance(event, RunEnded):
                self.ended = event
            else:
                yield event

    def ask(self, _: str, *, again: bool = False) -> None:
        """Stop the job, which has time for a checkpoint."""
        if again or not self._asked:
            self._asked = True
            with contextlib.suppress(ClusterError):  # the connection will be lost
                self.dashboard.stop(self.job)

    def kill(self) -> None:
        """End the job."""
        self.ask("", again=True)

    def _follow(self) -> None:
        *_, experiment, name = split_options(self.folder)[0].split("/")
        self._events.send(RunStarted(RunInfo(experiment, name, Path(self.folder), self.folder, {}, 1)))
        lines, values = Lines(self.key), dict[str, bytes]()

        def read(text: str) -> None:
            for line in lines.feed(text, values):
                self._events.send(event := self._decode(line, values))
                if isinstance(event, RunEnded):
                    raise _FollowedError

        try:
            self._events.send(self._end_of_job(self.dashboard.follow(self.job, read)))
        except _FollowedError:
            return
        except Exception as error:  # the iterator would wait forever
            self._events.send(RunEnded(LOST, {}, error=self._lost(error)))

    def _decode(self, line: bytes, values: dict[str, bytes]) -> Event:
        """Return an event, given the values that functions have returned, by rank.

        Raises:
            ValueError: it is not an event.
        """
        found = from_json(line, {})
        if found.get("kind") == END:
            error = MlxError(str(found["error"])) if found.get("error") else None
            return RunEnded(str(found.get("status")), found.get("metrics") or {}, found.get("best"), error)
        event = decode(line)
        if isinstance(event, FunctionReturned) and not event.problem:
            try:
                value = torch.load(io.BytesIO(values.pop(str(event.rank))), map_location="cpu", weights_only=True)
            except Exception as error:  # damaged or hostile: torch raises many types
                raise ValueError(f"what rank {event.rank} returned is not a value") from error
            event = replace(event, pickled=base64.b64encode(pickle.dumps(value)).decode())
        return event

    def _end_of_job(self, state: Any) -> RunEnded:
        """Return the end of a run whose job has ended without sending it."""
        if state.status == "STOPPED":
            return RunEnded("STOPPED", {})
        lines = self.dashboard.log(self.job).splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        text = errors[-1] if errors else f"{self.job} ended before the run did: {state.reason}"
        return RunEnded("FAILED", {}, error=MlxError(text))

    def _lost(self, error: Exception) -> ClusterError:
        title = "/".join(split_options(self.folder)[0].rsplit("/", 2)[1:])
        hint = f'Follow it again: reattach("{title}", address="{self.dashboard.address.url}")'
        return ClusterError(f"cannot follow {title}, which may still train: {short_message(error)}", hint)


class _FollowedError(Exception):
    """The end of the run has arrived."""


class Lines:
    """Finds the lines and files that a job has sent as frames in its log."""

    def __init__(self, key: str) -> None:
        self._reader, self._rest = part("ray.frames").Reader(key), b""

    def feed(self, text: str, files: dict[str, bytes]) -> Iterator[bytes]:
        """Yield the lines that a part of the log completes, and add files to `files`.

        Raises:
            ClusterError: a frame is damaged, or there is too much of them.
        """
        for frame in self._reader.feed(text):
            if frame.kind == "file":
                files[frame.text] = files.get(frame.text, b"") + frame.data
            if sum(map(len, files.values())) > MOST_BYTES:
                raise ClusterError(f"the cluster sent values of more than {size_text(MOST_BYTES)}")
            *lines, self._rest = (self._rest + frame.data * (frame.kind == "out")).split(b"\n")
            yield from lines


def address_of(text: str) -> Any:
    """Return the address of a cluster.

    Raises:
        UsageError: it is not one.
    """
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"address is {text!r}, which is not the address of a cluster; write http://HEAD:8265")
    return part("ray.addresses").Address.parse(text, "address")


def is_elsewhere(typed: str) -> bool:
    """Return True if this machine lacks the folder of the storage, which the cluster may have.

    `typed` is the path in the arguments of the call, empty if there is none.
    """
    path = storage_path(typed) or ""
    return path.startswith("/") and not Settings.read().job and not Path(path).exists()


def launch(job: RunJob, address: str) -> ClusterRun:
    """Check that a run can train on a cluster, upload the working directory, and submit the run as a job.

    Raises:
        UsageError, ConfigError: the address or a setting is wrong.
        ClusterError: the cluster does not answer, refuses the token or the job, or does not share the storage.
    """
    if job.request.fast or job.request.checkpoint:
        raise UsageError("--fast-dev-run and --eval run on this machine; leave out address=")
    typed = part("ray.commands").typed_storage(job.request.overrides)
    if is_elsewhere(typed):
        return launch_there(job, address, typed)
    return submit(job.module, job.name, job.function, job.request, address)


def submit(module: str, name: str, function: str, request: Request, address: str) -> ClusterRun:
    """Submit the job of a run on a machine that sees the storage.

    Raises:
        ClusterError: the cluster cannot run it; nothing was written.
    """
    lines, key = list[str](), f"mlx-{uuid.uuid4().hex}"
    experiment, where = getattr(project_module(module, Path.cwd()), name), address_of(address)
    title = function or f"{module}.{name}"
    try:
        launched = part("ray.launch").prepare(
            Path.cwd(), where, lambda: load_bound_config(experiment, request, title), write=lines.append
        )
    except ClusterError as error:
        failed = [": ".join(line.split(None, 2)[1:]) for line in lines if line.startswith("FAIL")]
        raise ClusterError("\n".join(failed) or str(error)) from None
    driver = ["-m", JOB, key, module, name, function]
    submitted = launched.submit_run(driver, function=function, key=key)
    return ClusterRun(submitted.client, submitted.id, key, submitted.facts["folder"], function)


def launch_there(
    job: RunJob,
    address: str,
    typed: str,
    *,
    folder: Path | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
    resume: str | None = None,
) -> ClusterRun:
    """Submit the job of a run from the cluster, because only that has the storage.

    Args:
        job: the run.
        address: address of the cluster.
        typed: path in the arguments of the call, empty if there is none.
        folder: a folder with the inputs of a function.
        values: settings of the function to compare with those of the run to resume.
        resume: that run.

    Raises:
        ClusterError: the cluster cannot run it; nothing was written.
    """
    where, key = address_of(address), f"mlx-{uuid.uuid4().hex}"
    dashboard, upload = part("ray.launch").connect(where, Path.cwd())
    files = [*(folder / inputs.INPUTS).iterdir()] if folder is not None else []
    asked: dict[str, Any] = {
        "module": job.module,
        "name": job.name,
        "function": job.function,
        "words": job.request.words,
    }
    asked |= {"values": dict(values), "resume": resume, "url": where.url}
    added = {str(SENT / ASKED): json.dumps(asked).encode(), LAUNCHED_FILE: launch_facts()}
    size = sum(size for _, size in upload.files) + sum(file.stat().st_size for file in files)
    if size > (most := part("ray.preflight").LIMIT_BYTES):
        text = f"the function, its datasets and the working directory have {size_text(size)}"
        raise UsageError(f"{text}, and a cluster accepts {size_text(most)}; read large data from files of the cluster")
    added |= {str(SENT / inputs.INPUTS / file.name): file.read_bytes() for file in files}
    environment = {KEY: key, LAUNCHED: LAUNCHED_FILE, "MLX_STORAGE": storage_path(typed) or ""}
    command = ["python", "-u", "-m", JOB, LAUNCH]
    metadata = part("ray.jobs").command_metadata()
    spec = part("ray.jobs").JobSpec(command, upload, environment, metadata, added=added)
    match dashboard.ask(
        "mlx-launch", spec, marker=f"{key} ", timeout_s=LAUNCH_S, silence_s=part("ray.dashboard").RECONNECT_S
    ):
        case {"job": str(submitted), "key": str(key), "folder": str(run)}:
            return ClusterRun(dashboard, submitted, key, run, job.function)
        case {"error": str(text), "hint": str(hint)}:
            raise ClusterError(text, hint)
    raise ClusterError(f"the launch on {where.url} sent an invalid answer")


def find(run: str | Path, address: str) -> ClusterRun:
    """Return a run that was launched on a cluster.

    Raises:
        UsageError: the cluster has no such run, or several in different storages.
        ClusterError: the cluster does not answer, or refuses the token.
    """
    where, text = address_of(address), str(run).rstrip("/")
    experiment, _, name = text.rpartition("/")
    dashboard = part("ray.dashboard").Dashboard.connect(where)
    found = {}
    for facts in sorted(dashboard.jobs(), key=lambda facts: facts.get("start_time") or 0):
        known = facts.get("metadata") or {}
        folder = known.get("folder", "")
        if "key" in known and (folder == text or (known["experiment"], known["run"]) == (experiment, name)):
            found[folder] = ClusterRun(dashboard, facts["submission_id"], known["key"], folder, known["function"])
    if len(found) > 1:
        raise UsageError(f"{where.url} has several runs {text}; name its folder: {', '.join(found)}")
    if not found:
        cure = "its job is forgotten, or was started by a command: mlx xp logs -f follows that"
        raise UsageError(f"{where.url} has no run {text} to reattach to; {cure}")
    return found.popitem()[1]
