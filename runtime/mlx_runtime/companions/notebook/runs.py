"""Runs from Python, in a notebook or a script: iterators of their epochs while they train."""

import contextlib
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Generic, TypeVar

from mlx_runtime.companions.notebook import cluster_runs
from mlx_runtime.companions.notebook.background import BackgroundRun, RunJob
from mlx_runtime.companions.notebook.cell_display import CellDisplay, in_notebook
from mlx_runtime.companions.notebook.cluster_runs import ClusterRun
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import CheckpointSaved, EpochEnded, Event, RunEnded, RunInfo, RunStarted, WorkersLost
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.queries.reader import Run, open_run
from mlx_runtime.tracking.console import Display

Listener = Callable[[Event], None]

Item = TypeVar("Item")

CHECK_S = 1.0
"""Interval at which an iterator checks whether the process of its run has exited, if no events arrive."""


@dataclass(frozen=True)
class Epoch:
    """A finished epoch.

    Attributes:
        epoch: number, from 0.
        epochs: expected in total.
        metrics: values recorded in it, like `{"val/accuracy": 0.97}`.
        seconds: duration.
        folder: path or URI of the run.
    """

    epoch: int
    epochs: int
    metrics: Mapping[str, float]
    seconds: float
    folder: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        status: `SUCCEEDED`, `STOPPED` or `PRUNED`.
        run: the stored run, as returned by `open_run`; None if it was deleted, as after `--fast-dev-run`.
        metrics: latest value of each recorded number, like `{"test/accuracy": 0.98}`.
        best: epoch, path and value of the best checkpoint by `cfg.monitor`, and its `step` if it is within an epoch; or
            None.
    """

    status: str
    run: Run | None
    metrics: Mapping[str, float]
    best: Mapping[str, Any] | None


def run(
    experiment: type[BaseModule],
    overrides: Sequence[str] = (),
    *,
    listeners: Sequence[Listener] = (),
    show: bool = True,
    address: str | None = None,
) -> "Training":
    """Train an experiment like `mlx train run`, and return an iterator of its epochs.

        for epoch in run(Experiment, ["cfg.num_epochs=5"]):
            print(epoch.epoch, epoch.metrics["val/accuracy"])

    The run trains in separate processes, independently of this one. They import the current files of the experiment.
    Call this in the folder of the experiment. Later runs start faster than the first as long as the environment
    variables, `sys.path` and the working directory stay the same.

    Args:
        experiment: class to train. The one in `src/experiment.py` is trained with conf.yaml; classes of other modules,
            such as `%%mlx` cells of a notebook, are trained with the defaults in their code.
        overrides: Hydra's overrides, and the options of `mlx train run`, like `--resume=run_003` and `--overfit=1`.
        listeners: called with each event of the run (`mlx_runtime.events`) while this process waits for epochs.
        show: print warnings, and the output of workers of the local engine. In a notebook, draw a table, too.
        address: dashboard of a Ray cluster to train on, like `http://head:8265`, after an upload of the working
            directory, as by `mlx train launch`. If this machine lacks the folder of the storage, it is a folder of the
            cluster: the run is launched from there.

    Raises:
        UsageError, ConfigError, DatasetError: the run cannot start; nothing was written.
        ClusterError: the cluster cannot run it; nothing was written.
    """
    request = Request.parse(require_list(overrides))
    module, name = importable(experiment)
    if module == AN_EXPERIMENT.module:
        AN_EXPERIMENT.folder()
    job = RunJob(module, name, request, tuple(sys.orig_argv), address=address or "")
    return Training(job, listeners, show, None if address is None else cluster_runs.launch(job, address))


def require_list(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides, or raise a UsageError if they are a single string."""
    if isinstance(overrides, str):
        raise UsageError(f"overrides is the string {overrides!r}; write a list: [{overrides!r}]")
    return tuple(overrides)


def importable(thing: Any) -> tuple[str, str]:
    """Return the names of the module and of the class or function. Workers import classes by these names.

    Raises:
        UsageError: workers cannot import it.
    """
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        raise UsageError(f"{thing!r:.60} is neither a class nor a function")
    module, name = thing.__module__, thing.__qualname__
    if getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False):
        cure = 'in a notebook, call it in a cell without %%mlx; elsewhere, below if __name__ == "__main__"'
        raise UsageError(f"{module} starts a run while it is imported, as workers would do again; {cure}")
    if module == "__main__" and isinstance(thing, type):
        where, cure = "a script", "move it to a file in src/"
        if in_notebook():
            where, cure = "cells without %%mlx", "add %%mlx to its cell, after %load_ext mlx_runtime"
        raise UsageError(f"workers cannot import {name} from {where}; {cure}")
    if not name.isidentifier() and isinstance(thing, type):
        raise UsageError(f"workers cannot import {module}.{name}; define it at the top level of a module")
    return module, name


class RunIterator(Generic[Item]):
    """A run in separate processes. Iterating over it follows the run; leaving the loop early stops the run.

    A stopped run saves a checkpoint and is marked STOPPED. After a second interrupt, it does not wait for the
    checkpoint, and a third kills the processes.

    Attributes:
        checkpoint_path: path or URI of the newest complete checkpoint, or None. Later checkpoints may replace it: see
            `cfg.keep_checkpoints`.
    """

    def __init__(
        self, job: RunJob, listeners: Sequence[Listener], show: bool, remote: ClusterRun | None = None
    ) -> None:
        self._listeners = list(listeners)
        if show:
            shown = CellDisplay() if in_notebook() else Display(sys.stdout, quiet=True)
            self._listeners += [shown.handle, _print_lost_workers]
        self.checkpoint_path: str | None = None
        self._unread: deque[Item] = deque()
        self._info: RunInfo | None = None
        self._end: RunEnded | None = None
        self._resume_call = job.resume_call
        self._receiving = threading.RLock()  # another thread, or a listener, may stop the run
        self._process = BackgroundRun(job) if remote is None else remote.follow()
        try:
            while self._info is None and self._end is None:
                self._receive()
        except BaseException:
            self._process.kill()
            raise
        if self._info is None and self._end is not None:
            raise _with_note(self._end.error or MlxError("the run ended before it began"))

    @property
    def folder(self) -> str:
        """Path or URI of the run."""
        assert self._info is not None, "it has started"
        return self._info.place

    @property
    def status(self) -> str:
        """`RUNNING` until the end of the run has been received; `LOST` if its cluster has stopped answering."""
        return self._end.status if self._end is not None else "RUNNING"

    def items(self, event: Event) -> Iterator[Item]:
        """Yield the items that an event contributes to the iteration."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Item]:
        """Yield the items of the run as they arrive.

        Raises:
            MlxError: the run failed.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        try:
            while self._end is None or self._unread:  # in this order, because another thread may receive the rest
                if self._unread:
                    yield self._unread.popleft()
                else:
                    self._receive()
        except BaseException as error:  # includes errors of listeners, and GeneratorExit after `break`
            self.stop("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "the loop over the run was left")
            if isinstance(error, KeyboardInterrupt):
                vars(error)["__notes__"] = [self._note()]
            raise
        if self._end.error is not None and self._end.status in ("FAILED", cluster_runs.LOST):
            raise _with_note(self._end.error)

    def result(self) -> Outcome:
        """Wait for the end of the run, and return its outcome.

        Raises:
            MlxError: the run failed.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        deque(self, maxlen=0)
        assert self._end is not None, "it has ended"
        stored = None
        with contextlib.suppress(UsageError):  # the run was deleted
            stored = open_run(self.folder)
        return Outcome(self._end.status, stored, self._end.metrics, self._end.best)

    def stop(self, reason: str = "stop()") -> None:
        """Stop the run with a checkpoint, and wait until it has ended."""
        self._process.ask(reason)
        for last_resort in (False, True):
            try:
                return self._wait()
            except KeyboardInterrupt:
                if last_resort:
                    self._process.kill()
                else:
                    self._process.ask("Ctrl-C", again=True)
        self._wait()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}, {self.status}>"

    def _note(self) -> str:
        """Return what an interrupted user can do next."""
        assert self._end is not None, "it has ended"
        if self.status == cluster_runs.LOST:
            return str(getattr(self._end.error, "hint", ""))
        resume = f". Resume: {self._resume_call(self.folder)}" if self.status == "STOPPED" else ""
        return f"{self.folder} is {self.status}{resume}"

    def _wait(self) -> None:
        while self._end is None:
            self._receive()

    def _receive(self) -> None:
        """Wait for events, and handle them."""
        with self._receiving:
            if self._end is not None:
                return
            connection.wait([self._process.events], CHECK_S)
            for event in self._process.read():
                self._handle(event)
            ended = self._process.ended
            if ended is not None and self._end is None:  # otherwise a listener has received it
                self._process.events.close()
                self._end = ended
                self._handle(ended)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._info = event.run
        elif isinstance(event, CheckpointSaved):
            self.checkpoint_path = event.path
        self._unread.extend(self.items(event))
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)  # it would fail again while `stop` waits for the end
                raise


def _with_note(error: BaseException) -> BaseException:
    """Add the hint of an error to the text that Python prints."""
    if hint := getattr(error, "hint", ""):
        vars(error)["__notes__"] = [hint]
    return error


class Training(RunIterator[Epoch]):
    """A run that was started by `run`: an iterator of its epochs."""

    _last_epoch = -1

    def items(self, event: Event) -> Iterator[Epoch]:
        match event:
            case EpochEnded(epoch, epochs, values, seconds) if epoch != self._last_epoch:
                self._last_epoch = epoch
                yield Epoch(epoch, epochs, values, seconds, self.folder)


def _print_lost_workers(event: Event) -> None:
    if isinstance(event, WorkersLost):
        print(f"lost rank {', '.join(map(str, event.ranks))}: {event.why:.200}; the workers are replaced", flush=True)
