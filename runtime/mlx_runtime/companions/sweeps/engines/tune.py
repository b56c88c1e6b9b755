"""The engine of sweeps in a cluster's job: Ray Tune places the drivers of runs, and replaces lost ones.

Each driver is an actor that trains one run as `mlx train run` does; Ray Train places its workers. The sweep decides
what runs and what is pruned, and keeps the records: Tune stores nothing that is read, and is never restored.
"""

import contextlib
import logging
import math
import os
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.companions.sweeps.definition import SweepPlan
from mlx_runtime.companions.sweeps.engines.base import Trials
from mlx_runtime.companions.sweeps.engines.room import room
from mlx_runtime.companions.sweeps.trial import TrialJob, begun_overrides, record_end, run_trial
from mlx_runtime.errors import StorageError, UsageError, full_message, short_message
from mlx_runtime.events import EpochEnded, Event, StepProgress
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, ask_to_stop, has_begun
from mlx_runtime.settings import environment
from mlx_runtime.storage.leases import HEARTBEAT_S, STALE_S
from mlx_runtime.training.stop_requests import GRACE_S, StopRequests

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}
"""Keep Tune from printing, from handling Ctrl-C, and from storing what nobody reads."""

ASK_S = 5.0
"""Interval between two requests to stop the same run."""

KILL_S = 5.0
"""How long a killed run may take to exit."""

POLL_S = 0.5
"""Interval between two looks at the driver of a run."""


class TuneTrials:
    """Runs trials on the cluster of this job. Construct it before signals are handled: Ray has handlers of its own.

    Raises:
        ConfigError, UsageError: not as many runs fit as the plan asks for.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._cfg, definition = plan.config.cfg, plan.definition
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(on_ray(self._cfg, forward=False))
            asked = (definition.parallel, definition.gpus_per_trial)
            self._parallel, self._gpus = room(self._cfg, cluster.cpus, cluster.gpus, *asked, cluster=True)
            self._ray = stack.pop_all()

    def close(self) -> None:
        """Leave the cluster, which ends what is left of the runs."""
        self._ray.close()

    def run(self, sweep: Trials) -> None:
        """Run all that the sweep gives, until nothing is left, or it wants all runs killed."""
        runs = _Runs(sweep, self._gpus)
        with (
            _killable(),
            tempfile.TemporaryDirectory(prefix="mlx-tune-") as scratch,
            environment(QUIET, replace=True),
        ):
            logging.getLogger("ray.tune").setLevel(logging.ERROR)
            tune.Tuner(
                tune.with_resources(_Run, tune.PlacementGroupFactory([self._needs])),
                tune_config=tune.TuneConfig(
                    search_alg=_Search(runs),
                    scheduler=_Schedule(runs),
                    num_samples=-1,
                    max_concurrent_trials=self._parallel,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name=uuid.uuid4().hex,
                    storage_path=scratch,
                    verbose=0,
                    callbacks=[_Stop(runs)],
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    failure_config=tune.FailureConfig(max_failures=self._cfg.elastic.max_failures),
                ),
            ).fit()
        if sweep.killing:
            self.close()
            for job in runs.jobs.values():
                _wait_for_driver(job.folder, KILL_S)  # it would record the run as running again
                record_end(job, "STOPPED")
                sweep.ended(job, "STOPPED")

    @property
    def _needs(self) -> dict[str, float]:
        """Resources of the process of a run. With workers it takes a byte of memory, and no CPU from them."""
        if self._cfg.start_workers:
            return {"memory": 1}
        return {"CPU": float(self._cfg.cpus_per_worker), "GPU": self._gpus}


class _Killed(BaseException):
    """Ends Tune immediately. It handles an `Exception` by ending each run first, as if that were pruned."""


@contextlib.contextmanager
def _killable() -> Iterator[None]:
    """Stop at `_Killed`, and raise the exception that caused it, if any."""
    try:
        yield
    except _Killed as killed:
        if killed.__cause__ is not None:
            raise killed.__cause__ from None


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Let an error of the sweep end Tune."""
    try:
        yield
    except Exception as error:
        raise _Killed from error


class _Runs:
    """The runs that Tune has, by Tune's ids, and the sweep that they belong to."""

    def __init__(self, sweep: Trials, gpus: float) -> None:
        self.sweep, self.gpus = sweep, gpus
        self.jobs: dict[str, TrialJob] = {}
        self.pruned: set[str] = set()
        self.errors: dict[str, str] = {}

    def __reduce__(self) -> Any:  # the Tuner pickles its parts, to be restored
        return (dict, ())


class _Search(Searcher):  # type: ignore[misc]
    """Gets the next run from the sweep."""

    def __init__(self, runs: _Runs) -> None:
        super().__init__()
        self._runs = runs

    def suggest(self, trial_id: str) -> Any:
        sweep = self._runs.sweep
        with _asking():
            job = None if sweep.stopping else sweep.next()
        if job is None:
            return None if self._runs.jobs else Searcher.FINISHED
        self._runs.jobs[trial_id] = job
        return {"job": replace(job, gpus=self._runs.gpus)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        job, (status, why) = self._runs.jobs.pop(trial_id), ("PRUNED", "")
        if error:
            status, why = "FAILED", f"the driver of the run was lost: {self._runs.errors[trial_id]}"
            record_end(job, status, why)
        elif trial_id not in self._runs.pruned and result is not None:
            status, why = result["status"], result["error"]
        with _asking():
            self._runs.sweep.ended(job, status, why)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the sweep has a record of its own."""


class _Schedule(FIFOScheduler):  # type: ignore[misc]
    """Lets the sweep decide which runs end early."""

    def __init__(self, runs: _Runs) -> None:
        super().__init__()
        self._runs = runs

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        with _asking():
            prune = self._runs.sweep.handle(self._runs.jobs[trial.trial_id], result["event"])
        if not prune:
            return str(TrialScheduler.CONTINUE)
        self._runs.pruned.add(trial.trial_id)
        return str(TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._runs.errors[trial.trial_id] = short_message(trial.get_pickled_error() or trial.get_error())


class _Stop(tune.Callback):  # type: ignore[misc]
    """Passes requests to stop the sweep on to its runs, through their folders.

    A run that is about to start withdraws the requests to its previous driver, so they are repeated.
    """

    def __init__(self, runs: _Runs) -> None:
        self._runs, self._asked_at = runs, -math.inf

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._runs.sweep.killing:
            raise _Killed
        if self._runs.sweep.stopping and time.monotonic() - self._asked_at > ASK_S:
            self._asked_at = time.monotonic()
            for job in self._runs.jobs.values():
                with contextlib.suppress(StorageError):
                    ask_to_stop(job.folder)


class _Run(tune.Trainable):  # type: ignore[misc]
    """A process on the cluster that drives one run. Tune ends it after a result, and with it the run."""

    def setup(self, config: dict[str, Any]) -> None:
        for name in ("MLX_JOB", "MLX_JOB_ADDRESS"):  # the job is that of the sweep
            os.environ.pop(name, None)
        self._results: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._control, self._epoch = StopRequests(), -1
        self._thread = threading.Thread(target=self._train, args=(config["job"],), name="run", daemon=True)
        self._thread.start()

    def step(self) -> dict[str, Any]:
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def cleanup(self) -> None:
        if self._thread.is_alive():
            self._control.request("the scheduler of the sweep", prune=True)
            self._thread.join(GRACE_S + HEARTBEAT_S)

    def _train(self, job: TrialJob) -> None:
        try:
            _wait_for_driver(job.folder, STALE_S + HEARTBEAT_S)
            if has_begun(job.folder):  # by the driver that was lost
                job = replace(job, overrides=begun_overrides(job.run))
            ended = run_trial(job, self._emit, self._control)
            error = full_message(ended.error) if ended.status == "FAILED" and ended.error is not None else ""
            self._results.put({"done": True, "status": ended.status, "error": error})
        except Exception as error:
            self._results.put(error)

    def _emit(self, event: Event) -> None:
        if isinstance(event, EpochEnded) or (isinstance(event, StepProgress) and event.epoch > self._epoch):
            self._epoch = event.epoch
            self._results.put({"event": event})


def _wait_for_driver(run: RunFolder, most_s: float) -> None:
    """Wait until a run has no driver: that of a lost machine seems alive until its lease expires."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        try:
            records.refuse_living(run)
        except UsageError:
            time.sleep(POLL_S)
        except StorageError:  # it has no record yet
            return
        else:
            return
