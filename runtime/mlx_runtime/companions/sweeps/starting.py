"""The start or resumption of a sweep: all checks and claims before the first run."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_runtime.companions.notebook.functions import load_function
from mlx_runtime.companions.sweeps.controller import Listener, Sweep, outcome
from mlx_runtime.companions.sweeps.definition import Definition, SweepPlan, differences, merge, plan
from mlx_runtime.companions.sweeps.states import TrialState, read_trial
from mlx_runtime.companions.sweeps.study import uses_optuna
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.folds import rows_digest
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs import drivers, records, snapshots
from mlx_runtime.runs.folder import SWEEP, RunFolder, claim_run, list_runs, named_run
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import map_concurrently
from mlx_runtime.runs.records import provenance
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.documents import is_name
from mlx_runtime.storage.files import storage_at, storage_root
from mlx_runtime.storage.redaction import HIDDEN

FOLDS = "folds.npz"
"""File of a sweep with the row numbers of each fold."""


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


def resumed_plan(experiment: type, folder: RunFolder, asked: Definition, *, force: bool, **how: bool) -> SweepPlan:
    """Check that a sweep can be resumed, with changed fields of its definition from the command.

    `how` are further arguments of `plan`.

    Raises:
        UsageError: another driver runs the sweep, or its definition or code has changed and `force` is not set.
    """
    record = drivers.refuse_living(folder)
    if "definition" not in record:
        raise UsageError(f"{folder.title} is not a sweep; resume a run with: mlx train run --resume {folder.name}")
    stored = Definition.from_json(record["definition"])
    definition = merge(stored, asked)
    if hidden := [text for text in definition.overrides if HIDDEN in text]:
        raise UsageError(f"{folder.title} does not hold the secret {hidden[0]}; pass all overrides again")
    if definition.experiment:
        experiment = object_at(definition.experiment)
    found = plan(experiment, definition, **how)
    load_function(found.config.cfg)  # the files that it imports are compared
    changes = differences(stored, found.definition)
    changes += [f"{file} differs" for file in snapshots.changed_files(Path.cwd(), folder)]
    if found.definition.folds != stored.folds:
        raise UsageError(f"{folder.title} has folds={stored.folds}, which cannot change; start another sweep")
    if found.rows and record.get("fold_rows") not in (None, rows_digest(found.rows)):
        changes.append("the folds have other rows")
    if changes and not force:
        listed = "\n  ".join([f"{folder.title} was started with another definition or code:", *changes])
        raise UsageError(f"{listed}\nUndo the changes, start another sweep, or resume it anyway with --force")
    return dataclasses.replace(found, folder=folder)


def finished_trials(plan: SweepPlan, *, retry_failed: bool) -> list[TrialState] | None:
    """Return the trials of the sweep to resume if no run is missing, otherwise None."""
    assert plan.folder is not None, "it resumes a sweep"
    record = records.load_record(plan.folder)
    if record["status"] not in ("SUCCEEDED", "FAILED"):
        return None
    trials = _stored_trials(plan, record, retry_failed)
    return None if outcome(plan, trials).unfinished else trials


def _stored_trials(plan: SweepPlan, record: Mapping[str, Any], retry_failed: bool) -> list[TrialState]:
    folder, definition = plan.folder, plan.definition
    assert folder is not None, "it resumes a sweep"
    of_definition = {"folds": definition.folds is not None, "retry_failed": retry_failed}
    return map_concurrently(
        lambda entry: read_trial(folder, entry, definition.metric, definition.mode, **of_definition), record["trials"]
    )


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
        file = folder.path / FOLDS
        np.savez_compressed(file, *(fold.held_out for fold in plan.rows))
        folder.push(file)
    record = records.Record(folder, before, **facts, attempt=attempt)
    return Sweep(record, plan, trials, listeners)
