"""A sweep from its definition to its end: checks, claims, and the engine that runs its trials."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook.functions import load_function
from mlx_runtime.companions.sweeps.controller import Listener, Sweep, outcome, read_record
from mlx_runtime.companions.sweeps.definition import FIXED, Definition, SweepPlan, differences, merge, plan
from mlx_runtime.companions.sweeps.engine import Engine
from mlx_runtime.companions.sweeps.events import SweepStarted
from mlx_runtime.companions.sweeps.scores import Trial, TrialRun, read_trials
from mlx_runtime.companions.sweeps.study import uses_optuna
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.folds import rows_digest
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs import drivers, records, snapshots, sources
from mlx_runtime.runs.folder import SWEEP, RunFolder, claim_run, list_runs, named_run, run_folder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import map_concurrently
from mlx_runtime.runs.records import provenance
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.documents import is_name
from mlx_runtime.storage.files import storage_at, storage_root
from mlx_runtime.storage.redaction import HIDDEN


def find_sweep(name: str = "latest", root: str | None = None, experiment: str | None = None) -> RunFolder:
    """Return a sweep by name (`sweep_001`, `lr` for `sweep_lr`, `latest`), path or URI.

    The default root and experiment are those of the working directory.

    Raises:
        UsageError: there is no such sweep.
    """
    if name != "latest":
        known = name.rpartition("/")[2].startswith(SWEEP)
        name = name if known else SWEEP + name
        return lookup.resolve_run(name) if root is None else named_run(name, root, experiment or "")
    root, experiment = root or lookup.storage_root(), experiment or lookup.conf_value("cfg.name") or ""
    found = [folder for folder in list_runs(root, experiment, sweeps=True) if folder.name.startswith(SWEEP)]
    begun = [folder for folder in found if folder.record.name in storage_at(folder.location).names()]
    if not begun:
        raise UsageError(f"{experiment} has no sweep in {root} to resume")
    return max(begun, key=lambda folder: (records.load_record(folder).get("start") or "", folder.name))


def checked_plan(
    experiment: type, asked: Definition, resumed: RunFolder | None, *, force: bool = False, **how: bool
) -> SweepPlan:
    """Return the plan of a new sweep, or of one to resume, with changed fields of its definition from the command.

    Args:
        experiment: Class to train, importable by name.
        asked: Definition from the command.
        resumed: Folder of the sweep to resume.
        force: Resume even if the definition or the code has changed.
        how: Further arguments of `plan`.

    Raises:
        UsageError, ConfigError: The sweep cannot start; nothing was written.
        UsageError: Another driver runs the sweep, or its definition or code has changed and `force` is not set.
    """
    if resumed is None:
        return plan(experiment, asked, **how)
    folder = resumed
    record = drivers.refuse_living(folder)
    if "definition" not in record:
        raise UsageError(f"{folder.title} is not a sweep; resume a run with: mlx train run --resume {folder.name}")
    stored = Definition.from_json(record["definition"])
    definition = merge(stored, asked)
    if hidden := [text for text in definition.overrides if HIDDEN in text]:
        raise UsageError(f"{folder.title} does not hold the secret {hidden[0]}; pass all overrides again")
    changed = differences(stored, definition)
    for name in FIXED:
        if name in changed:
            text = f"{folder.title} was started with other {name}, which cannot change: {changed[name]}"
            raise UsageError(f"{text}; leave them out, or start another sweep")
    if definition.experiment:
        experiment = object_at(definition.experiment)
    found = plan(experiment, definition, **how)
    if stored.seeds and found.definition.seed != stored.seed:
        raise UsageError(f"{folder.title} was started with cfg.seed={stored.seed}, which cannot change; set it again")
    load_function(found.config.cfg)  # the files that it imports are compared
    changes = [f"{name}: {text}" for name, text in differences(stored, found.definition).items()]
    changes += [f"{file} differs" for file in sources.changed_files(Path.cwd(), folder)]
    if found.rows and record.get("fold_rows") not in (None, rows_digest(found.rows)):
        changes.append("the folds have other rows")
    if changes and not force:
        listed = "\n  ".join([f"{folder.title} was started with another definition or code:", *changes])
        raise UsageError(f"{listed}\nUndo the changes, start another sweep, or resume it anyway with --force")
    return dataclasses.replace(found, folder=folder)


def drive(
    plan: SweepPlan,
    name: str = "",
    *,
    retry_failed: bool = False,
    listeners: Sequence[Listener] = (),
    begin: Callable[[Sweep], object] = lambda sweep: None,
) -> RunFolder:
    """Carry out a sweep, or the missing runs of one. Do not change the record of one that lacks none.

    Args:
        plan: Plan of the sweep.
        name: Name of a new sweep; empty for the next number.
        retry_failed: Run failed trials again.
        listeners: Called with each event of the sweep.
        begin: Called with the sweep before its first run.

    Raises:
        UsageError, ConfigError: The sweep cannot start; nothing was written.
        MlxError: It cannot continue, or no run records the metric.
    """
    before = records.load_record(plan.folder) if plan.folder is not None else {"status": "PENDING"}
    if plan.folder is not None and before["status"] in ("SUCCEEDED", "FAILED"):
        trials = _stored_trials(plan, before, retry_failed)
        ended = outcome(plan, trials)
        if not ended.unfinished:
            for event in (SweepStarted(plan.folder, plan.definition, tuple(trials)), ended):
                for listener in listeners:
                    listener(event)
            return plan.folder
    definition = plan.definition
    engine = Engine(plan.config.cfg, parallel=definition.parallel, gpus_per_trial=definition.gpus_per_trial)
    with contextlib.closing(engine):  # created before anything is written, because the trials may not fit
        sweep = claim(plan, name, retry_failed=retry_failed, listeners=listeners)
        begin(sweep)
        with sweep.supervise():
            engine.run(sweep)
    return sweep.record.folder


def _stored_trials(plan: SweepPlan, record: Mapping[str, Any], retry_failed: bool) -> list[Trial]:
    """Read the trials of the sweep to resume. Runs that are to be started or resumed are PENDING.

    Raises:
        UsageError: one of its runs is training.
    """
    sweep, parts = plan.folder, plan.definition.parts
    assert sweep is not None, "it resumes a sweep"
    final = {"SUCCEEDED", "PRUNED"} if retry_failed else {"SUCCEEDED", "PRUNED", "FAILED"}
    trials = read_trials(sweep, record["trials"], plan.definition.metric, plan.definition.mode)
    for trial in trials:
        trial.trained = len(trial.runs) if trial.done else trial.trained
        trial.runs += [TrialRun() for _ in parts[len(trial.runs) :]]  # of further seeds

    def check(place: tuple[Trial, int]) -> None:
        trial, index = place
        run = trial.runs[index]
        folder = run_folder(sweep.root, sweep.experiment, run.name or "")
        found = read_record(folder, sweep.name, trial.number, parts[index])
        if found and records.status_of(found) in records.LIVING:
            drivers.refuse_living(folder)
        if not found:  # it has not begun, or the folder belongs to another run
            run.row, run.epochs = None, {}
        run.status = found["status"] if found and found["status"] in final else "PENDING"

    places = [(trial, index) for trial in trials for index, run in enumerate(trial.runs) if run.name is not None]
    map_concurrently(check, places)
    return trials


def claim(plan: SweepPlan, name: str = "", *, retry_failed: bool = False, listeners: Sequence[Listener] = ()) -> Sweep:
    """Become the driver of a new sweep, or of the one to resume.

    Raises:
        UsageError: another driver runs the sweep, or there is a sweep with this name.
        MissingLibraryError: Optuna is needed, but not installed.
        StorageError: the folder cannot be written.
    """
    definition, cfg, project = plan.definition, plan.config.cfg, Path.cwd()
    if uses_optuna(definition.search, definition.scheduler):
        require("optuna", "a sweep other than a plain grid")  # before anything is written
    facts = provenance(definition.overrides) | {"status": "RUNNING", "start": documents.now()}
    facts |= {"definition": definition.as_json(), "monitor": definition.metric, "mode": definition.mode}
    if plan.folder is not None:
        folder, before = plan.folder, records.load_record(plan.folder)
        trials = _stored_trials(plan, before, retry_failed)
        attempt = drivers.take_over(folder)
        facts["start"] = before.get("start")
        if Settings.read().job is None:  # otherwise, the launch has recorded the earlier attempts
            facts |= {"attempts": records.attempts(before), "job": None}
    else:
        if name and not is_name(name):
            raise UsageError(f"--name {name!r} is not a valid folder name")
        folder = claim_run(storage_root(cfg.storage_path), cfg.name, SWEEP, name=name.removeprefix(SWEEP))
        before, trials, attempt = {"trials": []}, [], 1
        folder.claim_attempt(attempt, leases.lease())
    folder.path.mkdir(parents=True, exist_ok=True)
    snapshots.store(project, folder)
    if plan.rows:
        facts["fold_rows"] = rows_digest(plan.rows)
    record = records.Record(folder, before, **facts, attempt=attempt)
    return Sweep(record, plan, trials, listeners)
