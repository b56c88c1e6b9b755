"""The job that trains a run launched from Python, and the files by which other machines follow it.

They are in the folder of the run, named after the job:

    events-JOB.jsonl       events, one JSON object per line; the last one, of the kind `END`, is the outcome
    returned-JOB-0.pt      value that a training function has returned on rank 0, see `returned`
"""

import base64
import contextlib
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook.background import load_bound_config
from mlx_runtime.companions.notebook.functions import load_function
from mlx_runtime.companions.notebook.returned import write_value
from mlx_runtime.config.projects import project_module
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import MlxError, full_message
from mlx_runtime.events import (
    Event,
    FunctionReturned,
    RunEnded,
    RunStarted,
    StepProgress,
    WorkerEvent,
    encode,
)
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri
from mlx_runtime.storage.redaction import redact

END = "End"
"""Kind of the last line, with `status` and `error`, the text of an error or null."""

PUSH_S = 2.0
"""Interval at which new events are copied to an object store."""


def events_name(job: str) -> str:
    """Return the name of the file with the events that a job has written."""
    return f"events-{job}.jsonl"


def returned_name(job: str, rank: int) -> str:
    """Return the name of the file with the value that the function of a job has returned on a worker."""
    return f"returned-{job}-{rank}.pt"


class EventFile:
    """Writes the events of a run to a file in its folder.

    Args:
        job: id of the job.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._folder: RunFolder | None = None
        self._stream: Any = None
        self._written = threading.Event()
        self._closed = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator["EventFile"]:
        """Copy the file to the object store of the run, if it is on one, until the end of the block."""
        pusher = threading.Thread(target=self._push, name="events", daemon=True)
        pusher.start()
        try:
            yield self
        finally:
            self._closed.set()
            pusher.join()
            if self._stream is not None:
                self._stream.close()

    def handle(self, event: Event) -> None:
        """Write an event of the run, in the thread of the driver."""
        match event:
            case RunStarted(run):
                self._folder = RunFolder(run.folder, run.place if is_uri(run.place) else None)
                self._stream = (run.folder / events_name(self._job)).open("wb")
            case RunEnded(status=status, error=error):
                failed = error if status == "FAILED" else None
                text = redact(full_message(failed)) if failed is not None else None
                self._write(json.dumps({"kind": END, "status": status, "error": text}).encode())
            case FunctionReturned():
                self._store(event)
            case WorkerEvent() if not isinstance(event, StepProgress):
                self._write(encode(event))

    def _store(self, event: FunctionReturned) -> None:
        """Store a value, and then the event, without the value."""
        assert self._folder is not None, "the run has started"
        file, problem = self._folder.path / returned_name(self._job, event.rank), ""
        try:
            write_value(pickle.loads(base64.b64decode(event.pickled)), file)
            self._folder.push(file)
        except MlxError as error:
            problem = f"what rank {event.rank} returned was not sent back: {error}"
        self._write(encode(FunctionReturned(event.rank, event.world_size, "", problem)))

    def _write(self, line: bytes) -> None:
        if self._stream is not None:
            self._stream.write(line + b"\n")
            self._stream.flush()
            self._written.set()

    def _push(self) -> None:
        last = False
        while not last:
            last = self._closed.wait(PUSH_S)
            if self._written.is_set() and self._folder is not None:
                self._written.clear()
                self._folder.push(self._folder.path / events_name(self._job))


def main(module: str, name: str, function: str, *words: str) -> None:
    """Train a run in this job.

    Args:
        module: module of the experiment's class.
        name: name of that class.
        function: import path of the training function, or an empty string.
        words: the request, as arguments of main.py.
    """
    job = Settings.read().job
    assert job is not None, "this is a job"
    experiment = getattr(project_module(module, Path.cwd()), name)
    config = load_bound_config(experiment, Request.parse(words), function or f"{module}.{name}")
    load_function(config.cfg)  # report its errors before the run begins
    with EventFile(job["id"]).open() as events, connect(config.cfg) as cluster:
        fit(experiment, config, cluster, listeners=[events.handle])


if __name__ == "__main__":
    with clean_exit():
        main(*sys.argv[1:])
