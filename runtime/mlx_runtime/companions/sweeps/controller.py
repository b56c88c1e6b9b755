"""A running sweep: the choice of the next run, and the states of all trials, independent of the engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_runtime.companions.sweeps.definition import SweepPlan
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted, TrialEnded, TrialProgress, TrialStarted
from mlx_runtime.companions.sweeps.scores import best_checkpoint
from mlx_runtime.companions.sweeps.space import fold_overrides
from mlx_runtime.companions.sweeps.states import TrialState, best_of, best_trial, read_record
from mlx_runtime.companions.sweeps.study import Study
from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.errors import MlxError, StorageError, UsageError
from mlx_runtime.events import EpochEnded, Event, StepProgress, StopRequested
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RUN, RunFolder, claim_run, run_folder
from mlx_runtime.workers.stop_requests import StopRequests

Listener = Callable[[Event], None]


def planned_trials(plan: SweepPlan, begun: Sequence[TrialState]) -> int:
    """Return the number of trials of a sweep, given those that have begun."""
    outside = [trial for trial in begun if trial.values not in plan.space]  # the space was changed with --force
    return max(len(begun), plan.definition.trials + (len(outside) if plan.space.size else 0))


def outcome(plan: SweepPlan, trials: Sequence[TrialState]) -> SweepEnded:
    """Return the last event of a sweep if no other trial begins."""
    unfinished = planned_trials(plan, trials) - sum(trial.done for trial in trials)
    failed = sum(trial.status == "FAILED" for trial in trials)
    status = "STOPPED" if unfinished else "FAILED" if failed == len(trials) else "SUCCEEDED"
    best = best_trial(trials, plan.definition.mode)
    return SweepEnded(status, best.number if best else None, unfinished, failed)


class Sweep:
    """The trials of a sweep driven by this process. An engine requests runs from it, and reports their events.

    Args:
        record: Record of the sweep, claimed by this process.
        plan: Plan of the sweep.
        trials: Trials that have already begun.
        listeners: Called with each event of the sweep.

    Attributes:
        control: Collects requests to stop.
        problem: Error that ended the sweep, or None.
    """

    def __init__(
        self, record: records.Record, plan: SweepPlan, trials: Sequence[TrialState], listeners: Sequence[Listener] = ()
    ) -> None:
        self.record, self.plan, self.trials = record, plan, list(trials)
        self.control = StopRequests()
        self.problem: MlxError | None = None
        self._listeners = listeners
        self._stop_announced = self._killed = False
        self._pruned: set[int] = set()
        recorded = any(curve for trial in self.trials for curve in trial.curves)
        # Until one of the runs has recorded the metric.
        self._first_epochs: dict[str, EpochEnded] | None = None if recorded else {}
        definition = plan.definition
        self._count = planned_trials(plan, self.trials)
        self._study = Study(
            plan.space,
            search=definition.search,
            scheduler=definition.scheduler,
            mode=definition.mode,
            seed=definition.seed,
            epochs=plan.config.cfg.num_epochs,
        )
        for trial in self.trials:
            self._study.add(trial.number, trial.values)
        for trial in self.trials:
            self._report(trial)
            self._tell(trial)

    @property
    def stopping(self) -> bool:
        """True if no new run should start, and running trials should stop with a checkpoint."""
        if self.control.reason is not None and not self._stop_announced:
            self._stop_announced = True
            self._emit(StopRequested(self.control.reason))
        return self.problem is not None or self._stop_announced or self.killing

    @property
    def killing(self) -> bool:
        """True if running trials should be killed."""
        return self._killed or self.control.taken_over

    def kill(self) -> None:
        """End the sweep without waiting for checkpoints."""
        self._killed = True

    def next(self) -> TrialJob | None:
        """Return the next run to start; None if there is nothing to start now.

        The name of a run is recorded before its folder is created, so that a driver that takes over finds all folders.
        """
        if self.stopping:
            return None
        for trial in self.trials:
            if (index := trial.next_index) is not None:
                return self._job(trial, index)
        number = len(self.trials) + 1
        values = self._study.ask(number) if number <= self._count else None
        if values is None:
            return None
        self.trials.append(TrialState(number, values, [None] * (self.plan.definition.folds or 1)))
        return self._job(self.trials[-1], 0)

    def handle(self, job: TrialJob, event: Event) -> bool:
        """Handle an event of a run. Return True if all runs of its trial should be pruned."""
        if isinstance(event, EpochEnded):
            trial, value = self.trials[job.trial - 1], event.values.get(self.plan.definition.metric)
            if value is not None:
                trial.curves[job.fold or 0][event.epoch] = value
                self._first_epochs = None
                self._report(trial)
            self._emit(TrialProgress(job.trial, job.fold, event.epoch, event.epochs, value))
        if isinstance(event, EpochEnded | StepProgress):
            self._check_metric(job, event)
        return job.trial in self._pruned

    def ended(self, job: TrialJob, status: str, error: str = "") -> None:
        """Handle the outcome of a run: SUCCEEDED, PRUNED, FAILED or STOPPED."""
        trial, index, mode = self.trials[job.trial - 1], job.fold or 0, self.plan.definition.mode
        trial.statuses[index] = status
        if status == "SUCCEEDED" and self._first_epochs is not None:
            self._refuse_metric(job)
        if job.fold is None:
            with contextlib.suppress(StorageError):  # the run died before it had a record
                trial.checkpoint = best_checkpoint(records.load_record(job.folder), self.plan.definition.metric, mode)
        best = trial.best(mode) if job.fold is None else best_of(trial.curves[index], mode)
        self._emit(TrialEnded(job.trial, job.fold, status, best, error))
        if job.fold is not None and trial.done:
            self._emit(TrialEnded(job.trial, None, trial.status, trial.best(mode)))
        if trial.done:
            self.record.note(best=self._best())
        self._tell(trial)

    @contextlib.contextmanager
    def supervise(self) -> Iterator[None]:
        """Keep the record alive within the block, watch for requests to stop, and record the outcome of the sweep.

        Raises:
            MlxError: the sweep cannot continue, or another driver has taken it over.
        """
        folder = self.record.folder
        self._emit(SweepStarted(folder, self.plan.definition, tuple(trial for trial in self.trials if trial.done)))
        try:
            with self.control.watch(folder, self.record["attempt"]), self.record.alive():
                yield
        except BaseException:
            self.record.finish("STOPPED")
            raise
        if self.control.taken_over:
            raise self.record.disown()
        ended = outcome(self.plan, self.trials)
        self.record.finish(ended.status, best=self._best(), stop_reason=self.control.reason)
        self._emit(ended)
        if self.problem is not None:
            raise self.problem

    def _best(self) -> dict[str, Any] | None:
        """Return the fields about the best trial for the record: the mean of its folds and their standard deviation."""
        mode = self.plan.definition.mode
        if (trial := best_trial(self.trials, mode)) is None or (best := trial.best(mode)) is None:
            return None
        epoch, value = best
        return {"trial": trial.number, "epoch": epoch, "value": value, "std": trial.deviation(epoch)}

    def _job(self, trial: TrialState, index: int) -> TrialJob:
        """Claim the folder of a run, unless it was claimed before, and return the job for its process."""
        folds = self.plan.definition.folds
        fold = index if folds else None
        folder = self._claim_folder(trial, index)
        of_fold = fold_overrides(folds, index) if folds else ()
        overrides = () if folder.has_begun() else (*self.plan.space.expand(trial.values), *of_fold)
        trial.statuses[index] = "RUNNING"
        self._emit(TrialStarted(trial.number, fold, trial.values, folder.name))
        name, experiment = self.record.folder.name, self.plan.definition.experiment
        return TrialJob(name, trial.number, fold, trial.values, folder.location, overrides, experiment)

    def _claim_folder(self, trial: TrialState, index: int) -> RunFolder:
        """Return the recorded folder of a run, or a new one if it now belongs to another run."""
        sweep, name = self.record.folder, trial.runs[index]
        if name is not None:
            folder = run_folder(sweep.root, sweep.experiment, name)
            fold = index if self.plan.definition.folds else None
            record = read_record(folder, sweep.name, trial.number, fold)
            if record == {}:  # the driver was killed while it claimed the folder
                return claim_run(sweep.root, sweep.experiment, name=name.removeprefix(RUN), again=True)
            if record is not None:
                return folder

        def announce(name: str) -> None:
            trial.runs[index] = name
            self.record.update(trials=[trial.as_json() for trial in self.trials])

        return claim_run(sweep.root, sweep.experiment, announce=announce)

    def _report(self, trial: TrialState) -> None:
        """Report the values of a trial, without those after it was pruned: how many there are is a matter of time."""
        curve = trial.curve
        for epoch, value in curve.items():
            if trial.number in self._pruned:
                return
            prune = self._study.report(trial.number, epoch, value)
            # A resumed sweep, which reports in the order of trials, must not prune one that was once continued.
            if prune and (trial.status == "PRUNED" or epoch == max(curve)):
                self._pruned.add(trial.number)

    def _tell(self, trial: TrialState) -> None:
        if trial.done:
            best = trial.best(self.plan.definition.mode)
            self._study.tell(trial.number, trial.status, best[1] if best else None)

    def _check_metric(self, job: TrialJob, event: EpochEnded | StepProgress) -> None:
        """End the sweep if a run begins its second epoch, and has recorded other metrics of the stage in the first."""
        if self._first_epochs is None:
            return
        first = self._first_epochs.get(job.run)
        stage = self.plan.definition.metric.rpartition("/")[0]
        if first is not None and event.epoch > first.epoch:
            if stage and any(name.startswith(f"{stage}/") for name in first.values):
                self._refuse_metric(job)
        elif isinstance(event, EpochEnded):
            values = {**first.values, **event.values} if first is not None else event.values
            self._first_epochs[job.run] = dataclasses.replace(event, values=values)

    def _refuse_metric(self, job: TrialJob) -> None:
        first = (self._first_epochs or {}).get(job.run)
        metric, names = self.plan.definition.metric, sorted(first.values) if first is not None else []
        recorded = f" recorded {', '.join(names)}" if names else " recorded nothing"
        text = f"the trials do not record {metric}: the first{recorded}. Start another sweep with --metric and --mode"
        self.problem = self.problem or UsageError(text)

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
