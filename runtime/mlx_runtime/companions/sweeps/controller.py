"""A running sweep: the choice of the next run, and the states of all trials, independent of the engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlx_runtime.companions.sweeps.definition import SweepPlan
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted, TrialEnded, TrialProgress, TrialStarted
from mlx_runtime.companions.sweeps.scores import Trial, TrialRun, best_epoch, ranked
from mlx_runtime.companions.sweeps.space import WHOLE, Part
from mlx_runtime.companions.sweeps.study import Study
from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import EpochEnded, Event, StepProgress, StopRequested
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RUN, RunFolder, claim_run, run_folder
from mlx_runtime.runs.queries.listing import summarize
from mlx_runtime.storage.files import storage_at
from mlx_runtime.workers.stop_requests import StopRequests

Listener = Callable[[Event], None]


def planned_trials(plan: SweepPlan, begun: Sequence[Trial]) -> int:
    """Return the number of trials of a sweep, given those that have begun."""
    return max(len(begun), plan.definition.trials)


def outcome(plan: SweepPlan, trials: Sequence[Trial]) -> SweepEnded:
    """Return the last event of a sweep if no other trial begins."""
    unfinished = planned_trials(plan, trials) - sum(trial.done for trial in trials)
    failed = sum(trial.status == "FAILED" for trial in trials)
    status = "STOPPED" if unfinished else "FAILED" if failed == len(trials) else "SUCCEEDED"
    best = best_trial(trials, plan.definition.mode)
    return SweepEnded(status, best.number if best else None, unfinished, failed)


def best_trial(trials: Sequence[Trial], mode: str) -> Trial | None:
    """Return the trial with the best value, except failed ones."""
    first = next(iter(ranked(trials, mode)), None)
    return None if first is None or first.status == "FAILED" or first.score is None else first


def read_record(run: RunFolder, sweep: str, trial: int, part: Part) -> dict[str, Any] | None:
    """Return the record of a run of a trial; empty if it has none yet, None if the folder belongs to another run."""
    if storage_at(run.location).size_bytes(run.record.name) is None:
        return {}
    record = records.load_record(run)
    facts = record.get("sweep") or {}
    found = facts.get("name"), facts.get("trial"), (facts.get("seed"), facts.get("fold"))
    return record if found == (sweep, trial, part) else None


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
        self, record: records.Record, plan: SweepPlan, trials: Sequence[Trial], listeners: Sequence[Listener] = ()
    ) -> None:
        self.record, self.plan, self.trials = record, plan, list(trials)
        self.control = StopRequests()
        self.problem: MlxError | None = None
        self._listeners = listeners
        self._stop_announced = self._killed = False
        self._pruned: set[int] = set()
        definition = plan.definition
        recorded = any(run.curve(definition.metric) for trial in self.trials for run in trial.runs)
        # Until one of the runs has recorded the metric.
        self._first_epochs: dict[str, EpochEnded] | None = None if recorded else {}
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
            self._study.add(trial.number, trial.texts)
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
        definition = self.plan.definition
        runs = [TrialRun() for _ in definition.parts]
        self.trials.append(Trial(number, values, runs, definition.metric, definition.mode))
        return self._job(self.trials[-1], 0)

    def handle(self, job: TrialJob, event: Event) -> bool:
        """Handle an event of a run. Return True if all runs of its trial should be pruned."""
        if isinstance(event, EpochEnded):
            trial, value = self.trials[job.trial - 1], event.values.get(self.plan.definition.metric)
            if value is not None:
                trial.runs[job.index].epochs.setdefault(event.epoch + 1, {})[trial.metric] = value
                self._first_epochs = None
                self._report(trial)
            self._emit(TrialProgress(job.trial, job.part, event.epoch, event.epochs, value))
        if isinstance(event, EpochEnded | StepProgress):
            self._check_metric(job, event)
        return job.trial in self._pruned

    def ended(self, job: TrialJob, status: str, error: str = "") -> None:
        """Handle the outcome of a run: SUCCEEDED, PRUNED, FAILED or STOPPED."""
        trial = self.trials[job.trial - 1]
        run = trial.runs[job.index]
        (run.row,), run.status = summarize([job.folder]), status
        if status == "SUCCEEDED" and self._first_epochs is not None:
            self._refuse_metric(job)
        curve = trial.curve if job.part == WHOLE else run.curve(trial.metric)
        self._emit(TrialEnded(job.trial, job.part, status, _best_of(curve, trial.mode), error))
        if job.part != WHOLE and trial.done:
            self._emit(TrialEnded(job.trial, WHOLE, trial.status, _best_of(trial.curve, trial.mode)))
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
        """Return the fields about the best trial for the record: the mean of its runs and their standard deviation."""
        if (trial := best_trial(self.trials, self.plan.definition.mode)) is None or (epoch := trial.epoch) is None:
            return None
        std = trial.spread.get(trial.metric)
        return {"trial": trial.number, "epoch": epoch - 1, "value": trial.score, "std": std}

    def _job(self, trial: Trial, index: int) -> TrialJob:
        """Claim the folder of a run, unless it was claimed before, and return the job for its process."""
        definition = self.plan.definition
        part, folder = definition.parts[index], self._claim_folder(trial, index)
        overrides = () if folder.has_begun() else self.plan.space.expand(trial.texts) + part.overrides(definition.folds)
        trial.runs[index].status = "RUNNING"
        self._emit(TrialStarted(trial.number, part, trial.texts, folder.name))
        name, experiment = self.record.folder.name, definition.experiment
        return TrialJob(name, trial.number, index, part, trial.texts, folder.location, overrides, experiment)

    def _claim_folder(self, trial: Trial, index: int) -> RunFolder:
        """Return the recorded folder of a run, or a new one if it now belongs to another run."""
        sweep, name = self.record.folder, trial.runs[index].name
        if name is not None:
            folder = run_folder(sweep.root, sweep.experiment, name)
            record = read_record(folder, sweep.name, trial.number, self.plan.definition.parts[index])
            if record == {}:  # the driver was killed while it claimed the folder
                return claim_run(sweep.root, sweep.experiment, name=name.removeprefix(RUN), again=True)
            if record is not None:
                return folder

        def announce(name: str) -> None:
            trial.runs[index].name = name
            self.record.update(trials=[trial.as_json() for trial in self.trials])

        return claim_run(sweep.root, sweep.experiment, announce=announce)

    def _report(self, trial: Trial) -> None:
        """Report the values of a trial, without those after it was pruned: how many there are is a matter of time."""
        means = trial.means
        for epoch, value in means.items():
            if trial.number in self._pruned:
                return
            prune = self._study.report(trial.number, epoch - 1, value)
            # A resumed sweep, which reports in the order of trials, must not prune one that was once continued.
            if prune and (trial.status == "PRUNED" or epoch == max(means)):
                self._pruned.add(trial.number)

    def _tell(self, trial: Trial) -> None:
        if trial.done:
            self._study.tell(trial.number, trial.status, trial.score)

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


def _best_of(curve: Mapping[int, float], mode: str) -> tuple[int, float] | None:
    """Return the best epoch, from 0, and its value."""
    return None if (epoch := best_epoch(curve, mode)) is None else (epoch - 1, curve[epoch])
