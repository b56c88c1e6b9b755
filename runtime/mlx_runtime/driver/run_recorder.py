"""The record of a run, written by its driver: claimed at the start, updated by events, closed with the outcome."""

import contextlib
import datetime
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_runtime import companions, events
from mlx_runtime.config.constructors.targets import names_repositories
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.planning import RunPlan
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import MlxError, StorageError, UsageError, full_message, short_message
from mlx_runtime.runs import records, snapshots
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import EVALUATIONS, claim_run
from mlx_runtime.runs.records import provenance
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.files import join_path, storage_at, storage_root, to_json
from mlx_runtime.storage.redaction import redact
from mlx_runtime.tracking.trackers import flatten
from mlx_runtime.workers.stop_requests import held_signals


class RunRecorder:
    """Keeps the claimed `run.json` up to date with the events of a run."""

    def __init__(self, record: records.Record, plan: RunPlan) -> None:
        self.record, self._plan = record, plan
        self.metrics: Mapping[str, float] = {}  # latest value of every recorded number, once the loop has ended
        self.best: dict[str, Any] | None = self.record["best"]  # best checkpoint by `cfg.monitor`
        self.stopped = False  # the run was stopped before the end of the loop
        self.world_size = 0  # set when the workers have started
        self.trains = False  # the workers have started, and none has been lost since
        self._begun = False
        self._datasets: dict[str, dict[str, int]] = {}

    def handle(self, event: events.Event) -> None:
        match event:
            case events.LoopStarted():
                self.begin()
            case events.WorkersStarted(device, parameters, world_size, _):
                restarted, self.world_size = self.world_size > 0, world_size
                facts = {} if restarted else {"device": device, "parameters": parameters}
                facts |= {"workers": world_size} if self._plan.config.cfg.start_workers else {}
                self.record.update(**facts, status="RUNNING", waits_for=None)
                self.trains = True
            case events.WorkersWaiting(why):
                self.record.update(status="WAITING", waits_for=why)
            case events.DatasetsPrepared(names):
                self.record.update(prepared=dict(names))
            case events.LoaderOpened(name, _, rows, steps, global_batch):
                self._datasets[name] = {"rows": rows, "steps": steps, "global_batch": global_batch}
                self.record.update(datasets=self._datasets)
            case events.EpochEnded(epoch, epochs, values):
                self.record.note(epoch=epoch, epochs=epochs, metrics={**(self.record["metrics"] or {}), **values})
            case events.CheckpointSaved():
                self._record_checkpoint(event)
            case events.StopRequested(reason):
                self.record.note(stop_reason=reason)
            case events.WorkersLost():
                self.trains = False
                self.record.update(failures=(self.record["failures"] or 0) + 1)
            case events.LoopEnded(metrics, stopped):
                self.metrics, self.stopped = metrics, stopped

    def begin(self) -> None:
        """Begin this attempt. Until all state is restored, a resumed run keeps its conf.yaml and can be put back."""
        if not self._begun:
            self._begun = True
            self.record.begin(self._plan.config.yaml())
            if (cls := self._plan.experiment).__module__ != AN_EXPERIMENT.module:
                self.record.update(experiment_class=f"{cls.__module__}.{cls.__qualname__}")
            tree = self._plan.config.tree
            values = flatten(self._plan.config.shown)
            self.record.update(values={key: value for key, value in values if documents.SCALAR.fits(value)})
            if names_repositories(tree) and (hub := companions.part("hub.pins").repositories_of(tree)):
                self.record.update(hub=hub)
            if self._plan.config.kept:
                snapshots.store(self._plan.project, self.record.folder)

    def succeed(self) -> events.RunEnded:
        """Record that the run has succeeded."""
        self.begin()
        keeps = self._plan.config.cfg.keep_checkpoints or self._plan.config.checkpoint is not None
        self.record.finish("SUCCEEDED", metrics=dict(self.metrics), **({} if keeps else {"latest": None, "best": None}))
        if not keeps:
            self.best = None
            CheckpointStore(self.record.folder.checkpoints).prune(0, None, "max", latest=False)
        evaluation = None
        if self._plan.config.checkpoint is not None:
            evaluation = store_evaluation(self._plan.config, self.metrics)
        return events.RunEnded("SUCCEEDED", self.metrics, self.best, evaluation=evaluation)

    def end_early(self, status: str, error: BaseException) -> events.RunEnded:
        """Record an early end. A run that has not resumed yet stays unchanged, unless it is pruned."""
        fields = {"error": redact(full_message(error))} if status == "FAILED" else {}
        try:
            if status == "PRUNED":
                self.begin()
            if self.record.resuming:
                self.record.withdraw()
            else:
                self.record.finish(status, **fields)
        except StorageError:
            if status != "FAILED":
                raise  # otherwise the storage may be what failed, as the error reports
        return events.RunEnded(status, self.metrics or self.record["metrics"] or {}, self.best, error)

    def _record_checkpoint(self, event: events.CheckpointSaved) -> None:
        cfg = self._plan.config.cfg
        entry: dict[str, Any] = {"epoch": event.epoch, "path": event.path, "value": event.metrics.get(cfg.monitor)}
        if not event.finished:
            entry["step"] = event.step
        best = score(self.best["value"] if self.best else None, cfg.mode)
        if -math.inf < score(entry["value"], cfg.mode) >= best:  # as in `best_first`
            self.best = entry
        metrics = {**(self.record["metrics"] or {}), **event.metrics}
        self.record.update(metrics=metrics, latest=entry, best=self.best)


def claim(plan: RunPlan, guard: contextlib.ExitStack) -> records.Record:
    """Become the driver of a run, new or resumed. Signals are held back in `guard` once the record marks it as alive.

    Raises:
        UsageError: another driver is training the run.
        StorageError: the run folder cannot be written.
    """
    config, job = plan.config, Settings.read().job
    facts = _facts(plan, launched=job is not None)
    if config.run is not None:
        from mlx_runtime.loop.resuming import best_kept
        from mlx_runtime.runs import drivers  # here, because new runs do not need them

        folder, attempt = config.run, drivers.take_over(config.run)
        stored = records.stored_record(folder)
        previous = records.relocate(stored, folder)
        replaced = stored.get(records.REPLACED) or stored
        facts |= {records.REPLACED: replaced, "best": best_kept(folder, config.cfg.monitor, config.cfg.mode)}
        ours = job is not None and records.REPLACED in stored and (stored.get("job") or {}).get("id") == job["id"]
        if not ours and (previous["status"] != "PENDING" or job is None):  # else the launcher has recorded these
            previous = records.relocate(replaced, folder)
            facts |= {"attempts": records.attempts(previous), "job": job}
    else:
        folder = config.claimed or claim_run(storage_root(config.cfg.storage_path), config.cfg.name)
        previous = {}
        if config.claimed and storage_at(folder.location).size_bytes(folder.record.name) is not None:
            from mlx_runtime.runs import drivers

            previous = drivers.refuse_living(folder)
        attempt = folder.attempts() + 1 if config.claimed else 1  # an earlier driver may have died before the run began
        try:
            claimed = folder.claim_attempt(attempt, leases.lease())
        except MlxError:
            if config.claimed is None:  # it is ours alone
                with contextlib.suppress(OSError):
                    storage_at(folder.location).remove_folder()
            raise
        if not claimed:
            raise UsageError(f"another driver has just started {folder.title}")
        if config.origin:
            facts["from"] = config.origin.title
    folder.path.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        folder.reserve_space()
    guard.enter_context(held_signals())
    return records.Record(folder, previous, **facts, attempt=attempt)


def _facts(plan: RunPlan, *, launched: bool) -> dict[str, Any]:
    """Return the initial fields of the record."""
    cfg, facts = plan.config.cfg, provenance(plan.config.overrides)
    if launched:  # the launcher has recorded these
        facts = {name: value for name, value in facts.items() if name not in ("command", "git")}
    if plan.fold is not None:
        split = cfg.cross_validation
        facts["fold"] = {"fold": split.fold, "folds": split.folds, "rows": plan.fold.digest}
    if cfg.transfer:
        facts["transfer"] = companions.part("surgery.transferring").hashes(cfg.transfer)
    return facts | {
        "status": "RUNNING",
        "seed": cfg.seed,
        "start": documents.now(),
        "workers": cfg.start_workers,
        "engine": {"asked": cfg.engine, "used": plan.cluster.engine},
        "epochs": cfg.num_epochs,
        "monitor": cfg.monitor,
        "mode": cfg.mode,
        **({"sweep": dict(plan.config.sweep)} if plan.config.sweep else {}),
    }


def store_evaluation(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """Store the metrics of a checkpoint in the folder of its run, and return their path."""
    assert config.origin is not None
    when = datetime.datetime.now(datetime.timezone.utc)
    facts = {"time": when.isoformat(timespec="seconds"), "checkpoint": config.checkpoint, "metrics": dict(metrics)}
    facts |= provenance(config.overrides) | {"workers": config.cfg.start_workers, "seed": config.cfg.seed}
    parts = (EVALUATIONS, f"{when:%Y-%m-%dT%H%M%S.%f}-{uuid.uuid4().hex[:6]}.json")  # names sort by time
    storage = storage_at(config.origin.location)
    try:
        if storage.local:
            Path(storage.of(EVALUATIONS)).mkdir(exist_ok=True)
        storage.write(to_json(facts).encode(), *parts)
    except OSError as error:
        raise StorageError(
            f"cannot write {join_path(config.origin.location, EVALUATIONS)}: {short_message(error)}"
        ) from error
    return join_path(config.origin.location, *parts)
