"""Runs from Python, in a notebook or a script: iterators of their epochs while they train."""

import contextlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from typing import Any, Generic, TypeVar

from mlx_runtime.companions.notebook import cluster_runs
from mlx_runtime.companions.notebook.background import RunJob, work
from mlx_runtime.companions.notebook.cell_display import CellDisplay, in_notebook
from mlx_runtime.companions.notebook.cluster_runs import ClusterRun
from mlx_runtime.companions.notebook.links import RunProcess
from mlx_runtime.companions.notebook.standby import get_server
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import CheckpointSaved, EpochEnded, Event, RunEnded, RunInfo, RunStarted, WorkersLost
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs.queries.reader import Run, open_run
from mlx_runtime.tracking.console import Display
from mlx_runtime.workers.fork_server import exit_reason

Listener = Callable[[Event], None]

Item = TypeVar("Item")

POLL_S = 0.5
"""Interval at which the process of a run is checked."""


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
    _training: "Training" = field(repr=False, compare=False)

    @property
    def checkpoint(self) -> str | None:
        """Path or URI of the checkpoint at its end. Waits until that is complete.

        None if the loop saved none, which is known once a later one is complete, or the run has ended. Later epochs may
        remove the checkpoint: see `cfg.keep_checkpoints`.
        """
        return self._training.checkpoint_of(self.epoch)


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

    In a script, call this below `if __name__ == "__main__"`.

    Args:
        experiment: class to train. The one in `src/experiment.py` is trained with conf.yaml; classes of other modules,
            such as `%%mlx` cells of a notebook, are trained with the defaults in their code.
        overrides: Hydra's overrides, and the options of `mlx train run`, like `--resume=run_003` and `--overfit=1`.
        listeners: called with each event of the run (`mlx_runtime.events`) while this process waits for epochs.
        show: print warnings, and the output of workers of the local engine. In a notebook, draw a table and a curve,
            too.
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
    job = RunJob(module, name, request, tuple(sys.orig_argv))
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
    """

    resume_argument = "--resume={}"

    def __init__(
        self, job: RunJob, listeners: Sequence[Listener], show: bool, remote: ClusterRun | None = None
    ) -> None:
        self._listeners = list(listeners)
        if show:
            shown = CellDisplay() if in_notebook() else Display(sys.stdout, quiet=True)
            self._listeners += [shown.handle, _print_lost_workers]
        self._unread: deque[Item] = deque()
        self._info: RunInfo | None = None
        self._end: RunEnded | None = None
        self._server: Any = remote or get_server(job.title)
        self._process: RunProcess | ClusterRun
        self._number, self._process = self._server.start(partial(work, job))
        try:
            while self._info is None and self._end is None:
                self._receive()
        except BaseException:
            self._server.kill(self._number)
            self._server.release(self._number)
            raise
        if self._info is None and self._end is not None:
            raise self.error(self._end.error or MlxError("the run ended before it began"))

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

    def error(self, error: BaseException) -> BaseException:
        """Return the error to raise here for an error of the run."""
        return _add_note(error)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items of the run as they arrive.

        Raises:
            MlxError: the run failed.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        try:
            while self._unread or self._end is None:
                if self._unread:
                    yield self._unread.popleft()
                else:
                    self._receive()
        except BaseException as error:  # includes errors of listeners, and GeneratorExit after `break`
            self.stop("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "the loop over the run was left")
            if isinstance(error, KeyboardInterrupt):
                argument = self.resume_argument.format(self.folder)
                vars(error)["__notes__"] = [f"{self.folder} is {self.status}; resume it with {argument}"]
            raise
        if self._end.error is not None and self._end.status in ("FAILED", cluster_runs.LOST):
            raise self.error(self._end.error)

    def result(self) -> Outcome:
        """Wait for the end of the run, and return its outcome.

        Raises:
            MlxError: the run failed.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        deque(self, maxlen=0)
        assert self._end is not None, "it has ended"
        with contextlib.suppress(UsageError):  # the run was deleted
            return Outcome(self._end.status, open_run(self.folder), self._end.metrics, self._end.best)
        return Outcome(self._end.status, None, self._end.metrics, self._end.best)

    def stop(self, reason: str = "stop()") -> None:
        """Stop the run with a checkpoint, and wait until it has ended."""
        self._process.ask(reason)
        for last_resort in (False, True):
            try:
                return self._wait()
            except KeyboardInterrupt:
                if last_resort:
                    self._server.kill(self._number)
                else:
                    self._process.ask("Ctrl-C", again=True)
        self._wait()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}, {self.status}>"

    def _wait(self) -> None:
        while self._end is None:
            self._receive()

    def _receive(self) -> None:
        """Wait for events, and handle them."""
        connection.wait([self._process.events], POLL_S)
        lost: MlxError | None = None
        try:
            code = self._server.exit_code(self._number)  # read before the events, so that none sent earlier is missed
            if code is not None:
                lost = MlxError(f"the process of the run {exit_reason(code)}")
        except MlxError as error:
            lost = error
        for event in self._process.read():
            self._handle(event)
        ended = self._process.ended or (RunEnded("FAILED", {}, error=lost) if lost is not None else None)
        if ended is not None:
            self._process.events.close()
            self._server.release(self._number)
            self._end = ended
            self._handle(ended)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._info = event.run
        self._unread.extend(self.items(event))
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)  # it would fail again while `stop` waits for the end
                raise


def _add_note(error: BaseException) -> BaseException:
    """Add the hint of an error to the text that Python prints."""
    if hint := getattr(error, "hint", ""):
        vars(error)["__notes__"] = [hint]
    return error


class Training(RunIterator[Epoch]):
    """A run that was started by `run`: an iterator of its epochs."""

    _last_epoch = -1

    def __init__(
        self, job: RunJob, listeners: Sequence[Listener], show: bool, remote: ClusterRun | None = None
    ) -> None:
        self._checkpoints: dict[int, str] = {}  # by epoch
        super().__init__(job, listeners, show, remote)

    def items(self, event: Event) -> Iterator[Epoch]:
        match event:
            case CheckpointSaved(epoch, finished=True, path=path):
                self._checkpoints[epoch] = path
            case EpochEnded(epoch, epochs, values, seconds) if epoch != self._last_epoch:
                self._last_epoch = epoch
                yield Epoch(epoch, epochs, values, seconds, self.folder, self)

    def checkpoint_of(self, epoch: int) -> str | None:
        """Wait until the checkpoint of an epoch is complete, and return its path or URI.

        Return None if it has none, which is known once a later one is complete, or the run has ended.
        """
        while max(self._checkpoints, default=-1) < epoch and self._end is None:
            self._receive()
        return self._checkpoints.get(epoch)


def _print_lost_workers(event: Event) -> None:
    if isinstance(event, WorkersLost):
        print(f"lost rank {', '.join(map(str, event.ranks))}: {event.why:.200}; the workers are replaced", flush=True)
