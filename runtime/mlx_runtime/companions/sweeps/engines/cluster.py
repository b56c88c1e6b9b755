"""The engine of sweeps in a cluster's job: Ray places the drivers of runs, and replaces lost ones.

Each driver is an actor that trains one run as `mlx train run` does, and starts its workers.
"""

import contextlib
import os
import queue
import threading
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from mlx_runtime.companions.notebook.links import PRUNE
from mlx_runtime.companions.ray.reservation import release
from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.companions.sweeps.engines.base import STOP, Trials
from mlx_runtime.companions.sweeps.engines.room import room
from mlx_runtime.companions.sweeps.trial import TrialJob, record_end, run_trial
from mlx_runtime.errors import full_message, short_message
from mlx_runtime.events import EpochEnded, Event, StepProgress
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs import drivers
from mlx_runtime.storage.leases import HEARTBEAT_S, STALE_S
from mlx_runtime.workers.stop_requests import StopRequests

POLL_S = 0.5
"""Interval at which requests to stop are noticed, and between two looks at the driver of a run."""

KILL_S = 5.0
"""How long a killed run may take to exit."""

End = tuple[str, str]
"""Status of a run that has ended, and its error."""


class OnCluster:
    """Runs trials on the cluster of this job. Construct it before signals are handled: Ray has handlers of its own.

    Args:
        cfg: settings that all trials have in common.
        parallel: trials at the same time; by default as many as fit.
        gpus_per_trial: GPUs, or the share of one, of each trial.

    Raises:
        ConfigError, UsageError: this does not fit; see `room`.
    """

    def __init__(self, cfg: TrainConfig, *, parallel: int | None, gpus_per_trial: float | None) -> None:
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(on_ray(cfg, forward=False))
            self._parallel, self._gpus = room(cfg, cluster.cpus, cluster.gpus, parallel, gpus_per_trial, cluster=True)
            self._ray = stack.pop_all()
        self._max_failures = cfg.elastic.max_failures
        # With workers, the driver takes no CPU from them.
        alone = {"num_cpus": cfg.cpus_per_worker, "num_gpus": self._gpus}
        self._driver = ray.remote(**{"num_cpus": 0} if cfg.start_workers else alone)(_Driver)
        self._running: dict[Any, _Trial] = {}

    def close(self) -> None:
        """Leave the cluster, which ends the remaining runs."""
        self._ray.close()

    def run(self, sweep: Trials) -> None:
        """Run all trials of the sweep, until none is left or it wants them killed."""
        while not sweep.killing:
            while len(self._running) < self._parallel and (job := sweep.next()) is not None:
                job = replace(job, gpus=self._gpus)
                self._ask(_Trial(job, self._driver.remote(job)), sweep)
            if not self._running:
                return
            ready, _ = ray.wait([*self._running], timeout=POLL_S)
            for answer in ready:
                self._take(answer, self._running.pop(answer), sweep)
        self.close()
        for trial in self._running.values():
            drivers.wait_for_end(trial.job.folder, KILL_S)  # it would record the run as running again
            record_end(trial.job, "STOPPED")
            sweep.ended(trial.job, "STOPPED")

    def _ask(self, trial: "_Trial", sweep: Trials) -> None:
        """Ask a driver for its next event. Requests go with every call: the driver may have replaced a lost one."""
        request = PRUNE if trial.pruned else STOP if sweep.stopping else None
        self._running[trial.driver.next.remote(request)] = trial

    def _take(self, answer: Any, trial: "_Trial", sweep: Trials) -> None:
        """Pass an event or the end of a run on to the sweep."""
        try:
            found: Event | End | None = ray.get(answer)
        except RayError as error:
            ray.kill(trial.driver)  # it may be out of reach only
            release(trial.job.folder.title)  # for its workers
            trial.failures += 1
            if trial.failures <= self._max_failures or self._max_failures < 0:
                trial.driver = self._driver.remote(trial.job)
                return self._ask(trial, sweep)
            found = "FAILED", f"the driver of the run was lost: {short_message(error)}"
            record_end(trial.job, *found)
        if isinstance(found, tuple):
            ray.kill(trial.driver)  # immediately: a thread of user code could keep it from exiting
            return sweep.ended(trial.job, *found)
        if found is not None and sweep.handle(trial.job, found):
            for other in (trial, *self._running.values()):
                other.pruned |= other.job.trial == trial.job.trial
        self._ask(trial, sweep)


@dataclass
class _Trial:
    """A run, and the actor that drives it."""

    job: TrialJob
    driver: Any
    failures: int = 0
    pruned: bool = False


class _Driver:
    """A process on the cluster that drives one run, or resumes that of a lost one."""

    def __init__(self, job: TrialJob) -> None:
        for name in ("MLX_JOB", "MLX_JOB_ADDRESS"):  # the job is that of the sweep
            os.environ.pop(name, None)
        self._found: queue.SimpleQueue[Event | End] = queue.SimpleQueue()
        self._control, self._epoch = StopRequests(), -1
        threading.Thread(target=self._train, args=(job,), name="run", daemon=True).start()

    def next(self, request: str | None) -> Event | End | None:
        """Return the next event, or None if there is none within `POLL_S`. `request` asks the run to end."""
        if request is not None:
            self._control.request(request, prune=request == PRUNE)
        with contextlib.suppress(queue.Empty):
            return self._found.get(timeout=POLL_S)
        return None

    def _train(self, job: TrialJob) -> None:
        try:
            drivers.wait_for_end(job.folder, STALE_S + HEARTBEAT_S)
            if job.folder.has_begun():  # by the driver that was lost
                job = replace(job, overrides=())
            ended = run_trial(job, self._emit, self._control)
            failed = ended.error if ended.status == "FAILED" else None
            self._found.put((ended.status, full_message(failed) if failed is not None else ""))
        except Exception as error:
            record_end(job, "FAILED", full_message(error))
            self._found.put(("FAILED", full_message(error)))

    def _emit(self, event: Event) -> None:
        if isinstance(event, EpochEnded) or (isinstance(event, StepProgress) and event.epoch > self._epoch):
            self._epoch = event.epoch
            self._found.put(event)
