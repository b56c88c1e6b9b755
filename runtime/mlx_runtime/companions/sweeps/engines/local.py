"""The engine of sweeps for one machine: trials are processes, forked from a server that has imported the experiment.

Start that server with `workers.local.warm_up`, right after the import and before the first thread.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from typing import Any

from mlx_runtime.companions.notebook.links import PRUNE, Link, RunProcess
from mlx_runtime.companions.sweeps.engines.base import STOP, Trials
from mlx_runtime.companions.sweeps.engines.room import room
from mlx_runtime.companions.sweeps.trial import TrialJob, record_end, run_trial
from mlx_runtime.errors import ConfigError, full_message
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.logs import LogFile, log_name
from mlx_runtime.workers.fork_server import exit_reason
from mlx_runtime.workers.local import cool_down, take_server, warm_up
from mlx_runtime.workers.placement import shortage

PRELOADED = (__name__, "mlx_runtime.workers.worker")
"""What trials import in addition to what workers do."""

POLL_S = 0.2
"""Interval at which requests to stop are noticed."""

EXIT_S = 10.0
"""How long the process of a trial may take to exit once its run has ended."""


@dataclass(frozen=True)
class Slots:
    """Room for the trials that run at the same time on this machine."""

    environments: tuple[Mapping[str, str], ...]  # variables of the trial in each slot
    gpus: float  # per trial; below 1, trials share a GPU


def slots(cfg: TrainConfig, parallel: int | None = None, gpus_per_trial: float | None = None) -> Slots:
    """Return as many slots as asked for, by default as many as fit.

    Raises:
        ConfigError: not even one trial fits.
        UsageError: see `room`.
    """
    import torch

    cores, total = os.cpu_count() or 1, torch.cuda.device_count()
    if lacking := shortage(cfg, cores, total, cluster=False):
        raise ConfigError(lacking)
    number, gpus = room(cfg, cores, total, parallel, gpus_per_trial, cluster=False)
    if not gpus:
        return Slots(tuple({"CUDA_VISIBLE_DEVICES": ""} for _ in range(number)), 0)
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(total)))).split(",")[:total]
    whole = int(gpus)
    own = [visible[slot * whole : (slot + 1) * whole] if whole else [visible[slot % total]] for slot in range(number)]
    return Slots(tuple({"CUDA_VISIBLE_DEVICES": ",".join(devices)} for devices in own), gpus)


class Local:
    """Runs trials in processes of this machine. Construct it in the main thread, before other threads are started.

    Args:
        cfg: settings that all trials have in common.
        parallel: trials at the same time.
        gpus_per_trial: GPUs, or the share of one, of each trial.

    Raises:
        ConfigError, UsageError: this does not fit; see `slots`.
    """

    def __init__(self, cfg: TrainConfig, *, parallel: int | None = None, gpus_per_trial: float | None = None) -> None:
        self._room = slots(cfg, parallel, gpus_per_trial)
        self._free = list(range(len(self._room.environments)))
        self._server = take_server()
        self._server.preload(*PRELOADED)
        self._numbers = itertools.count()
        self._running: dict[int, _Trial] = {}

    def run(self, sweep: Trials) -> None:
        """Run all that the sweep gives, until nothing is left.

        Raises:
            MlxError: the fork server has ended, and all trials with it.
        """
        while True:
            while self._free and not sweep.stopping and (job := sweep.next()) is not None:
                self._start(job)
            if not self._running:
                return
            connection.wait([self._server.fileno(), *(trial.events for trial in self._running.values())], POLL_S)
            for trial in self._running.values():
                self._forward(trial, sweep)
            for number, code in self._server.exits():
                self._end(self._running.pop(number), code, sweep)
            self._stop(sweep)

    def close(self) -> None:
        """Kill the trials that are still running, and end the server."""
        self._server.close()

    def _start(self, job: TrialJob) -> None:
        slot, number = self._free.pop(0), next(self._numbers)
        target = partial(work, replace(job, gpus=self._room.gpus))
        variables = {**os.environ, **self._room.environments[slot]}
        self._running[number] = _Trial(job, slot, self._server, number, target, variables)

    def _forward(self, trial: "_Trial", sweep: Trials) -> None:
        """Pass the events of a trial on, and prune all of its runs if the sweep wants that."""
        for event in trial.read():
            if sweep.handle(trial.job, event):
                for other in self._running.values():
                    if other.job.trial == trial.job.trial:
                        other.ask(PRUNE)

    def _stop(self, sweep: Trials) -> None:
        """Stop or kill trials if the sweep wants that, and kill those that do not exit."""
        for number, trial in self._running.items():
            if sweep.stopping:
                trial.ask(STOP)
            if sweep.killing or (trial.ended is not None and time.monotonic() - trial.ended_at > EXIT_S):
                self._server.kill(number)

    def _end(self, trial: "_Trial", code: int, sweep: Trials) -> None:
        """Report the end of a trial whose process has ended."""
        self._forward(trial, sweep)
        trial.events.close()
        self._free.append(trial.slot)
        if (ended := trial.ended) is not None:
            failed = ended.error if ended.status == "FAILED" else None
            sweep.ended(trial.job, ended.status, full_message(failed) if failed is not None else "")
            return
        status, error = ("STOPPED", "") if sweep.killing else ("FAILED", f"its process {exit_reason(code)}")
        record_end(trial.job, status, error)
        with contextlib.closing(LogFile(trial.job.folder, log_name())) as log:
            log.write(f"{'error: ' if error else ''}{error or 'killed'}\n")
        sweep.ended(trial.job, status, error)


class _Trial(RunProcess):
    """The process of a run, and its state."""

    def __init__(self, job: TrialJob, slot: int, *started: Any) -> None:
        super().__init__(*started)
        self.job, self.slot = job, slot


def work(job: TrialJob, engine: Any) -> int:
    """Run a trial in this process, which the server has just started; `engine` is the connection to it."""
    warm_up()  # before the storage starts threads
    link = Link(engine)
    ended = run_trial(job, link.emit, link.control)
    cool_down()  # the run may have failed before it used the server, which would keep this process from exiting
    link.finish(ended)
    return 0
