"""A sweep in a terminal: signals, a log, a time limit and a display."""

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_runtime.companions.sweeps.controller import Sweep, outcome
from mlx_runtime.companions.sweeps.definition import Definition, SweepPlan, plan
from mlx_runtime.companions.sweeps.display import SweepDisplay
from mlx_runtime.companions.sweeps.engines.base import SweepEngine, SweepEngineClass
from mlx_runtime.companions.sweeps.engines.local import Local
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted
from mlx_runtime.companions.sweeps.starting import claim, find_sweep, finished_trials, resumed_plan
from mlx_runtime.companions.sweeps.states import TrialState
from mlx_runtime.errors import MlxError, RunStopped
from mlx_runtime.events import Event
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import Log
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import plural
from mlx_runtime.settings import Settings
from mlx_runtime.workers import placement
from mlx_runtime.workers.local import cool_down

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
    if resume is None:
        checked = plan(experiment, asked, large=large)
    else:
        checked = resumed_plan(experiment, find_sweep(resume), asked, force=force, large=large)
        if (trials := finished_trials(checked, retry_failed=retry_failed)) is not None:
            return _show_results(checked, trials)
    engine = engine_for(checked)  # before anything is written, because the trials may not fit
    with contextlib.closing(engine), contextlib.ExitStack() as stack:
        terminal = _Terminal(checked, stack)
        sweep = claim(checked, name, retry_failed=retry_failed, listeners=[terminal.handle])
        if max_time_s is not None:
            timer = threading.Timer(max_time_s, sweep.control.request, [MAX_TIME])
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        with handle_signals(sweep), sweep.supervise():
            engine.run(sweep)
    assert terminal.ended is not None, "it ended without an error"
    _raise_failure(sweep.record.folder, sweep.trials, terminal.ended, sweep.control.reason)


def engine_for(checked: SweepPlan) -> SweepEngine:
    """Return the engine that runs the trials: that of `cfg.engine`, of the cluster of this job, or of this machine.

    Raises:
        UsageError, ConfigError: it cannot run the trials, or so many do not fit.
    """
    cfg, definition = checked.config.cfg, checked.definition
    name, _ = placement.engine_for(cfg)
    engine: SweepEngineClass | None = getattr(placement.engine_class(name), "sweep_engine", None)
    if engine is not None:
        cool_down()  # it starts processes of its own
    elif placement.JOB_FLAG in os.environ:
        from mlx_runtime.companions.sweeps.engines.cluster import OnCluster

        engine = OnCluster
    else:
        engine = Local
    return engine(cfg, parallel=definition.parallel, gpus_per_trial=definition.gpus_per_trial)


def _show_results(checked: SweepPlan, trials: Sequence[TrialState]) -> None:
    """Print the results of a sweep that has ended, without changing its record."""
    assert checked.folder is not None, "it resumes a sweep"
    _ignore_signals()
    ended = outcome(checked, trials)
    with contextlib.ExitStack() as stack:
        terminal = _Terminal(checked, stack)
        terminal.handle(SweepStarted(checked.folder, checked.definition, tuple(trials)))
        terminal.handle(ended)
    _raise_failure(checked.folder, trials, ended, None)


class _Terminal:
    """Opens the log and the display once the folder of the sweep is known."""

    def __init__(self, checked: SweepPlan, stack: contextlib.ExitStack) -> None:
        self._plan, self._stack = checked, stack
        self._display: SweepDisplay | None = None
        self.ended: SweepEnded | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, SweepStarted):
            log = self._stack.enter_context(Log(event.folder))
            quiet = Settings.read().quiet
            self._display = SweepDisplay(self._plan, log.screen if quiet else sys.stdout, log.copy, quiet=quiet)
            self._stack.callback(self._display.close)
        if isinstance(event, SweepEnded):
            self.ended = event
        if self._display is not None:
            self._display.handle(event)


@contextlib.contextmanager
def handle_signals(sweep: Sweep) -> Iterator[None]:
    """Within the block, stop the sweep at the first Ctrl-C or SIGTERM, and kill its trials at the second Ctrl-C.

    After the end of the sweep, both are ignored, because the process is exiting.
    """

    def stop(number: int, _: Any) -> None:
        if sweep.control.reason is None:
            sweep.control.request("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        elif number == signal.SIGINT:
            sweep.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    finally:
        _ignore_signals()


def _ignore_signals() -> None:
    """Ignore Ctrl-C and SIGTERM until this process exits, because it only prints results."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _raise_failure(folder: RunFolder, trials: Sequence[TrialState], ended: SweepEnded, reason: str | None) -> None:
    """Raise the error that determines the exit code, unless the sweep succeeded."""
    name = folder.name if folder.experiment == lookup.conf_value("cfg.name") else folder.title
    resume = shlex.join(["mlx", "train", "sweep", f"--resume={name}"])
    if ended.status == "FAILED":
        first = next(trial for trial in trials if trial.status == "FAILED")
        raise MlxError(f"all trials failed. See the log of the first: mlx xp logs {folder.experiment} {first.runs[0]}")
    if ended.status == "STOPPED":
        left = plural(ended.unfinished, "trial")
        text = f"stopped; {left} of {folder.title} {'remains' if ended.unfinished == 1 else 'remain'}. Resume: {resume}"
        raise RunStopped(text, 0 if reason == MAX_TIME else 130 if reason == "Ctrl-C" else 143, reason)
