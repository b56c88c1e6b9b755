"""A run in a terminal: the driver with signals, a log and a display."""

import contextlib
import errno
import os
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.driver.console_lines import ConsoleLines, resume_command
from mlx_runtime.driver.driver import Driver
from mlx_runtime.driver.planning import RunPlan, prepare_run
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import (
    HangError,
    MlxError,
    RunStopped,
    StorageError,
    WorkerLoopError,
    WorkerLostError,
    full_message,
)
from mlx_runtime.events import Event, RunEnded, RunInfo, RunStarted
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.job import Cluster
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import Log
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.tracking.console import Display
from mlx_runtime.workers.stop_requests import (
    OUTPUT_CLOSED,
    StopRequests,
    Terminated,
    hangup_ignored,
    interrupt_main,
    sigterm_stops,
)


@dataclass(frozen=True)
class Result:
    """The outcome of a run that has succeeded.

    Attributes:
        folder: folder of the run.
        metrics: latest value of every recorded number, like `{"test/accuracy": 0.98}`.
        best: epoch, path and value of the best checkpoint by `cfg.monitor`, or None.
    """

    folder: RunFolder
    metrics: dict[str, float]
    best: dict[str, Any] | None = None


def fit(
    experiment: type[BaseModule],
    config: RunConfig,
    cluster: Cluster,
    *,
    listeners: Sequence[Callable[[Event], None]] = (),
    control: StopRequests | None = None,
    resume_call: Callable[[str], str] | None = None,
) -> Result:
    """Train an experiment in a new run, or resume the run that the config names.

    Call it in the main thread. From other threads, use a `Driver`.

    Args:
        experiment: class to train, importable by name.
        config: config returned by `load_config`.
        cluster: cluster returned by `connect`.
        listeners: called with each event of the run (`mlx_runtime.events`).
        control: lets other threads end the run; it interrupts the main thread.
        resume_call: returns the code that resumes the run at a path or URI, if that is not a command.

    Raises:
        DatasetError: a dataset cannot be batched; nothing was started.
        UsageError: another driver is training the run.
        StorageError: the run folder cannot be written.
        WorkerLoopError: user code raised an exception.
        WorkerLostError: workers were lost more than `cfg.elastic.max_failures` times.
        HangError: the workers deadlocked.
        RunStopped: Ctrl-C, SIGTERM, a closed terminal or pipe, or `mlx xp stop`; the run is marked STOPPED.
    """
    with prepare_run(experiment, config, cluster) as plan:
        terminal = _Terminal(plan, listeners, control or StopRequests(interrupt_main), resume_call)
        ended = terminal.run()
        return Result(terminal.driver.folder, dict(ended.metrics), dict(ended.best) if ended.best else None)


class _Terminal:
    """Adds the parts of a terminal to a driver: signals, a log, a display, and the next command to type."""

    def __init__(
        self,
        plan: RunPlan,
        listeners: Sequence[Callable[[Event], None]],
        control: StopRequests,
        resume_call: Callable[[str], str] | None,
    ) -> None:
        self.driver = Driver(plan, [self._handle, *listeners], control=control)
        self._plan, self._resume_call = plan, resume_call
        self._stack = contextlib.ExitStack()
        self._lines: ConsoleLines | None = None

    def run(self) -> RunEnded:
        """Train, and return the last event of a run that succeeded."""
        control = self.driver.control
        with self._stack:
            try:
                with sigterm_stops(control):
                    ended = self.driver.run()
            except KeyboardInterrupt as error:
                if self.driver.recorder is None:
                    raise  # before there was a run to stop
                code = control.exit_code if isinstance(error, Terminated) else 130
                raise RunStopped(self._message(), code, control.reason) from None
            except MlxError as error:
                error.hint = error.hint or self._hint(error)
                if self.driver.stopped:  # its end could not be recorded
                    error.exit_code = control.exit_code if control.reason else RunStopped.exit_code
                raise
            if ended.status == "STOPPED":
                raise RunStopped(self._message(), control.exit_code, control.reason)
            return ended

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._open(event.run)
        if self._lines is not None:
            try:
                self._lines.handle(event)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._lose_output(stops=error.errno == errno.EPIPE and not hangup_ignored())

    def _lose_output(self, *, stops: bool) -> None:
        """Write no more to an output that is closed. A closed pipe stops the run, as SIGPIPE stops other commands.

        A closed terminal sends SIGHUP instead, and a run that ignores that signal continues.
        """
        then = "stopping with a checkpoint. Redirect it to a file to train on" if stops else "training continues"
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            try:
                print(f"{OUTPUT_CLOSED}; {then}", file=sys.stderr)
            except OSError:
                os.dup2(nowhere.fileno(), 2)
        if stops:
            self.driver.control.request(OUTPUT_CLOSED)

    def _open(self, run: RunInfo) -> None:
        """Open the log and the display."""
        log = self._stack.enter_context(Log(self.driver.folder))
        if run.attempt > 1:
            log.write(f"\n--- {documents.now()}: attempt {run.attempt}\n")
        cfg = self._plan.config.cfg
        epochs = cfg.num_epochs if cfg.max_steps is None and self._plan.config.checkpoint is None else None
        display = Display(log.screen, log.write, epochs=epochs, quiet=Settings.read().quiet)
        self._stack.callback(display.close)
        if self._plan.cluster.in_driver:
            self._stack.enter_context(at_breakpoint(display.step_aside))
        self._lines = ConsoleLines(display, self._plan)

        def log_error(_: Any, error: BaseException | None, __: Any) -> None:
            if error is not None:
                log.write(f"error: {full_message(error)}\n")

        self._stack.push(log_error)

    def _message(self) -> str:
        """Return a message about the state of a run that was stopped."""
        if not self._plan.config.kept:
            return "stopped; nothing of this run is kept"
        if self.driver.resuming:
            return f"stopped before {self._title} was resumed; it is unchanged"
        assert self.driver.recorder is not None
        saved = self.driver.recorder.record["latest"]
        left = "keeps its checkpoints. Resume" if saved else "has no checkpoint yet. Start it over"
        return f"stopped; {self._title} is marked STOPPED and {left}: {self._resume_command}"

    def _hint(self, error: MlxError) -> str:
        """Return the next command to type after an error, or an empty string."""
        if self.driver.recorder is None or self.driver.control.taken_over:
            return ""
        if self.driver.resuming:
            return f"{self._title} was not resumed and is unchanged."
        if not self._plan.config.kept:
            return ""
        if isinstance(error, StorageError):
            return f"Once the storage can be written again, resume: {self._resume_command}"
        workers_failed = isinstance(error, WorkerLoopError | WorkerLostError | HangError)
        if workers_failed and self.driver.recorder.record["latest"]:
            return f"Resume from the last checkpoint: {self._resume_command}"
        return ""

    @property
    def _title(self) -> str:
        return f"{self.driver.folder.experiment} {self.driver.folder.name}"

    @property
    def _resume_command(self) -> str:
        if self._resume_call is not None:
            return self._resume_call(self.driver.folder.location)
        return resume_command(self.driver.folder, self._plan.config.overrides)


@contextlib.contextmanager
def at_breakpoint(step_aside: Callable[[], object]) -> Iterator[None]:
    """Call a function at each `breakpoint()` of the block, before the debugger starts."""
    before = sys.breakpointhook

    def hook(*args: Any, **options: Any) -> Any:
        step_aside()
        if before is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
            return before(*args, **options)
        return pdb.Pdb().set_trace(sys._getframe().f_back)  # debug the user's frame; `before` would stop in this one

    sys.breakpointhook = hook
    try:
        yield
    finally:
        sys.breakpointhook = before
