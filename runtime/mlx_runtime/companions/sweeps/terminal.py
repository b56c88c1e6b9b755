"""A sweep in a terminal: signals, a log, a time limit and a display."""

import contextlib
import shlex
import signal
import sys
import threading
from typing import Any

from mlx_runtime.companions.sweeps.controller import Sweep
from mlx_runtime.companions.sweeps.definition import Definition, SweepPlan
from mlx_runtime.companions.sweeps.display import SweepDisplay
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.starting import checked_plan, drive, find_sweep
from mlx_runtime.errors import MlxError, RunStopped
from mlx_runtime.events import Event, StopRequested
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import Log
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import plural
from mlx_runtime.settings import Settings

MAX_TIME = "--max-time"
"""Reason of a stop that does not count as a failure."""


def run_sweep(
    experiment: type,
    asked: Definition,
    *,
    name: str = "",
    resume: str | None = None,
    retry_failed: bool = False,
    force: bool = False,
    large: bool = False,
    max_time_s: float | None = None,
) -> None:
    """Run a sweep, or the missing runs of one.

    Args:
        experiment: Class to train, importable by name.
        asked: Definition from the command.
        name: Name of a new sweep; empty for the next number.
        resume: Sweep to resume.
        retry_failed: Run failed trials again.
        force: Resume even if the definition or the code has changed.
        large: Allow a grid of any size.
        max_time_s: Stop after this many seconds.

    Raises:
        UsageError, ConfigError: the sweep cannot start; nothing was written.
        MlxError: all trials failed, or none records the metric.
        RunStopped: Ctrl-C, SIGTERM or `mlx xp stop`.
    """
    folder = find_sweep(resume) if resume is not None else None
    checked = checked_plan(experiment, asked, folder, force=force, large=large)
    with contextlib.ExitStack() as stack:

        def begin(sweep: Sweep) -> None:
            handle_signals(sweep)
            if max_time_s is not None:
                timer = threading.Timer(max_time_s, sweep.control.request, [MAX_TIME])
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)

        terminal = _Terminal(checked, stack)
        folder = drive(checked, name, retry_failed=retry_failed, listeners=[terminal.handle], begin=begin)
    assert terminal.ended is not None, "it ended without an error"
    _raise_failure(folder, terminal.ended, terminal.reason)


class _Terminal:
    """Opens the log and the display once the folder of the sweep is known."""

    def __init__(self, checked: SweepPlan, stack: contextlib.ExitStack) -> None:
        self._plan, self._stack = checked, stack
        self._display: SweepDisplay | None = None
        self.ended: SweepEnded | None = None
        self.reason: str | None = None  # of a stop

    def handle(self, event: Event) -> None:
        match event:
            case SweepStarted():
                log = self._stack.enter_context(Log(event.folder))
                quiet = Settings.read().quiet
                self._display = SweepDisplay(self._plan, log.screen if quiet else sys.stdout, log.copy, quiet=quiet)
                self._stack.callback(self._display.close)
            case StopRequested(why):
                self.reason = why
            case SweepEnded():
                self.ended = event
                for number in (signal.SIGINT, signal.SIGTERM):  # this process only prints results now
                    signal.signal(number, signal.SIG_IGN)
        assert self._display is not None, "the sweep has started"
        self._display.handle(event)


def handle_signals(sweep: Sweep) -> None:
    """Stop the sweep at the first Ctrl-C or SIGTERM, and kill its trials at the second Ctrl-C."""

    def stop(number: int, _: Any) -> None:
        if sweep.control.reason is None:
            sweep.control.request("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        elif number == signal.SIGINT:
            sweep.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _raise_failure(folder: RunFolder, ended: SweepEnded, reason: str | None) -> None:
    """Raise the error that determines the exit code, unless the sweep succeeded."""
    if ended.status == "FAILED":
        rows = [row for row, _ in SweepResult(folder).trials[0].started]
        first = next((row for row in rows if row.status == "FAILED"), rows[0]).folder
        raise MlxError(f"all trials failed. See the log of the first: mlx xp logs {first.experiment} {first.name}")
    if ended.status == "STOPPED":
        name = folder.name if folder.experiment == lookup.conf_value("cfg.name") else folder.title
        resume = shlex.join(["mlx", "train", "sweep", f"--resume={name}"])
        text = f"stopped with {plural(ended.unfinished, 'trial')} of {folder.title} left. Resume: {resume}"
        raise RunStopped(text, 0 if reason == MAX_TIME else 130 if reason == "Ctrl-C" else 143, reason)
