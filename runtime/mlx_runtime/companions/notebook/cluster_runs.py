"""Runs on a remote cluster, as seen from Python: launched as jobs, and followed through the storage and the dashboard.

The driver is a job (`cluster_job`), which writes the events of the run to a file in its folder. So it does not depend
on this process, and any process that sees the storage can follow it.
"""

import base64
import contextlib
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import cluster_job
from mlx_runtime.companions.notebook.background import RunJob, load_bound_config
from mlx_runtime.companions.notebook.cluster_job import END, events_name, returned_name
from mlx_runtime.companions.notebook.returned import UnknownClassError, read_value
from mlx_runtime.config.projects import project_module
from mlx_runtime.errors import ClusterError, MlxError, StorageError, UsageError, short_message
from mlx_runtime.events import Event, FunctionReturned, RunEnded, RunInfo, RunStarted, decode
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.lookup import conf_value, resolve_run
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import from_json
from mlx_runtime.storage.files import join_path, storage_at

POLL_S = 0.5
"""Interval for reading the events of a run, and the state of its job; four times as long on an object store."""

RECONNECT_S = 60.0
"""Maximum time without an answer of the cluster or the storage until the connection counts as lost."""

STORAGE = "MLX_STORAGE"

LOST = "LOST"
"""Status of a run whose cluster does not answer any more. It may still train."""


@dataclass
class ClusterRun:
    """A run on a cluster, in place of the server and the process of a run on this machine.

    Args:
        dashboard: the cluster.
        job: id of the job on it.
        folder: folder of the run.
        function: import path of the function that it calls, or an empty string.
    """

    dashboard: Any
    job: str
    folder: RunFolder
    function: str = ""

    def start(self, _: object) -> tuple[int, "ClusterRun"]:
        """Follow the run in a thread, which ends with this process."""
        self.ended: RunEnded | None = None
        self.events, self._events = multiprocessing.Pipe(duplex=False)
        self._asked = False
        threading.Thread(target=self._follow, name="cluster run", daemon=True).start()
        return 0, self

    def read(self) -> Iterator[Event]:
        """Yield the events that have arrived, except the end of the run, which `ended` holds."""
        while self.ended is None and self.events.poll():
            event = self.events.recv()
            if isinstance(event, RunEnded):
                self.ended = event
            else:
                yield event

    def ask(self, _: str, *, again: bool = False) -> None:
        """Ask the run, once, to end with a checkpoint; with `again`, or before it has begun, end its job."""
        with contextlib.suppress(ClusterError, StorageError):  # the connection will be lost
            if again or (not self._asked and records.load_record(self.folder).get("status") == "PENDING"):
                self.dashboard.stop(self.job)
            elif not self._asked:
                self.folder.ask(self.folder.STOP)
        self._asked = True

    def kill(self, _: int) -> None:
        """End the job."""
        self.ask("", again=True)

    def exit_code(self, _: int) -> None:
        """Return None: the end of a job is an event."""

    def release(self, _: int) -> None:
        """Do nothing: the thread has ended with the run."""

    def _follow(self) -> None:
        info = RunInfo(self.folder.experiment, self.folder.name, self.folder.path, self.folder.location, {}, 1)
        self._events.send(RunStarted(info))
        position, deadline = 0, time.monotonic() + RECONNECT_S
        while True:
            try:
                state = self.dashboard.state(self.job)  # before the events, so that none sent earlier is missed
                content = self._read_events(position)
                deadline = time.monotonic() + RECONNECT_S
                for line in content.splitlines(keepends=True):
                    if line.endswith(b"\n"):  # otherwise it is being written
                        position += len(line)
                        self._events.send(event := self._decode(line))
                        if isinstance(event, RunEnded):
                            return
                if state.ended:
                    return self._events.send(self._end_of_job(state))
            except Exception as error:  # the iterator would wait forever
                if time.monotonic() > deadline or not isinstance(error, MlxError | OSError):
                    return self._events.send(RunEnded(LOST, {}, error=self._lost(error)))
            time.sleep(POLL_S * (1 if self.folder.uri is None else 4))

    def _read_events(self, position: int) -> bytes:
        """Return the events that follow those at the first bytes of the file."""
        try:
            with storage_at(self.folder.location).open(events_name(self.job)) as stream:
                stream.seek(position)
                content: bytes = stream.read()
                return content
        except FileNotFoundError:  # the run has not begun
            return b""

    def _decode(self, line: bytes) -> Event:
        """Return an event in the file. Values that functions return are read from their own files.

        Raises:
            ValueError: it is not an event.
        """
        found = from_json(line, {})
        if found.get("kind") == END:
            record = records.load_record(self.folder)
            error = MlxError(str(found["error"])) if found.get("error") else None
            best = record.get("best")
            return RunEnded(str(found.get("status")), record.get("metrics") or {}, best, error)
        event = decode(line)
        if isinstance(event, FunctionReturned) and not event.problem:
            name = returned_name(self.job, event.rank)
            try:
                value = read_value(self.folder.read(name))
            except UnknownClassError as error:
                return replace(event, problem=f"what rank {event.rank} returned cannot be read here: {error}")
            except Exception as error:  # damaged or hostile: torch raises many types
                raise ValueError(f"{join_path(self.folder.location, name)} does not hold a value") from error
            event = replace(event, pickled=base64.b64encode(pickle.dumps(value)).decode())
        return event

    def _end_of_job(self, state: Any) -> RunEnded:
        """Return the end of a run whose job has ended without writing it."""
        status = "STOPPED" if state.status == "STOPPED" else "FAILED"
        lines = self.dashboard.log(self.job).splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        text = errors[-1] if errors else f"{self.job} ended before the run did: {state.reason}"
        record = records.load_record(self.folder)
        if record.get("status") == "PENDING":
            pending = records.Record(self.folder, record)
            fields = {"error": text} if status == "FAILED" else {}
            pending.withdraw() if records.REPLACED in record else pending.finish(status, **fields)
        return RunEnded(status, {}, error=None if status == "STOPPED" else MlxError(text))

    def _lost(self, error: Exception) -> ClusterError:
        problem = f"lost the connection to {self.folder.title}, which may still train"
        if not isinstance(error, MlxError | OSError):
            problem = f"cannot read the events of {self.folder.title}, which may still train"
        lost = ClusterError(f"{problem}: {short_message(error)}")
        lost.hint = f'Follow it again: reattach("{self.folder.title}", address="{self.dashboard.address.url}")'
        return lost


def _address(text: str) -> Any:
    """Return the address of a cluster.

    Raises:
        UsageError: it is not one.
    """
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"address is {text!r}, which is not the address of a cluster; write http://HEAD:8265")
    return part("ray.addresses").Address.parse(text, "address")


@contextlib.contextmanager
def storage_there(address: str, typed: str | None = None) -> Iterator[bool]:
    """Within the block, the storage of this process is that of the cluster, if only that has it. Yield True if so.

    `typed` is the path in the arguments of the call, if there is one.
    """
    path, before = typed or Settings.read().storage or conf_value("cfg.storage_path") or "", os.environ.get(STORAGE)
    root = part("ray.cluster_storage").reached(path, _address(address).url)
    if root == path:
        yield False
        return
    os.environ[STORAGE] = root
    try:
        yield True
    finally:
        os.environ.pop(STORAGE)
        os.environ.update({} if before is None else {STORAGE: before})


def launch(job: RunJob, address: str) -> ClusterRun:
    """Check that a run can train on a cluster, upload the working directory, and submit the run as a job.

    Raises:
        UsageError, ConfigError: the address or a setting is wrong.
        ClusterError: the cluster does not answer, refuses the token or the job, or does not share the storage.
    """
    if job.request.fast or job.request.checkpoint:
        raise UsageError("--fast-dev-run and --eval run on this machine; leave out address=")
    overrides = job.request.overrides
    path, others = part("ray.cluster_storage").split_path(overrides)
    with storage_there(address, path) as there:
        kept = others if there else overrides
        return _launch(replace(job, request=replace(job.request, overrides=kept)), address)


def _launch(job: RunJob, address: str) -> ClusterRun:
    lines = list[str]()
    experiment = getattr(project_module(job.module, Path.cwd()), job.name)
    where = _address(address)
    try:
        launch = part("ray.launch").prepare(
            Path.cwd(), where, lambda: load_bound_config(experiment, job.request, job.title), write=lines.append
        )
    except ClusterError as error:
        failed = [": ".join(line.split(None, 2)[1:]) for line in lines if line.startswith("FAIL")]
        raise ClusterError("\n".join(failed) or str(error)) from None
    driver = ["-m", cluster_job.__name__, job.module, job.name, job.function]
    submitted = launch.submit_run(driver, function=job.function)
    return ClusterRun(submitted.dashboard, submitted.id, submitted.run, job.function)


def find(run: str | Path, address: str) -> ClusterRun:
    """Return a run that was launched on a cluster.

    Raises:
        UsageError: there is no such run, or it has no job.
        ClusterError: the cluster does not answer, refuses the token, or does not know the job.
    """
    where = _address(address)
    with storage_there(address):
        folder = resolve_run(part("ray.cluster_storage").reached(str(run), where.url))
    job = (records.load_record(folder).get("job") or {}).get("id")
    if job is None:
        raise UsageError(f"{folder.title} does not run on a cluster; read it with open_run({folder.title!r})")
    dashboard = part("ray.dashboard").Dashboard.connect(where)
    metadata = dashboard.state(job).metadata
    if "function" not in metadata:
        raise UsageError(f"{folder.title} was started by a command; follow it: mlx xp logs -f {folder.title}")
    return ClusterRun(dashboard, job, folder, metadata["function"])
