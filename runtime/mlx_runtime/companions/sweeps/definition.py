"""The definition of a sweep: its parameters, its search, and the metric by which trials are compared."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlx_runtime import companions
from mlx_runtime.companions.notebook.background import conf_of
from mlx_runtime.companions.sweeps.space import Part, Space, check, parse, parts_of, trial_count
from mlx_runtime.config.projects import CONF
from mlx_runtime.data.folds import Fold, fold_rows
from mlx_runtime.driver.request import RunConfig, load_config
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.redaction import redact_override

CHANGEABLE = ("trials", "parallel", "gpus_per_trial")
"""Fields that a resumed sweep may change without `--force`."""

FIXED = ("overrides", "folds", "seeds")
"""Fields that a resumed sweep cannot change, except for more seeds."""

OF_FOLDS = ("cfg.seed", "cfg.cross_validation.splitter")
"""Settings that determine the held-out rows of a fold."""


@dataclass(frozen=True)
class Definition:
    """The definition of a sweep, stored in its record. `plan` fills in empty fields with defaults.

    Attributes:
        overrides: Overrides as typed.
        search: `grid`, `random` or `optuna`.
        scheduler: `none` or `asha`.
        metric: Metric by which trials are compared.
        mode: `max` or `min`, whether larger or smaller values are better.
        trials: Number of trials.
        folds: Folds of a cross-validation, with a run per trial each; None without.
        seeds: Seeds of each trial, with one run each or, with folds, one per fold; None for `cfg.seed` alone.
        seed: Seed of the search, and the first of each trial.
        parallel: Number of runs at the same time; None for as many as fit.
        gpus_per_trial: GPUs of each run, or its share of one; None for the needs of its workers.
        experiment: Path of the class that is trained, like `src.notebook.Experiment`; empty for `src.experiment`.
    """

    overrides: tuple[str, ...] = ()
    search: str = ""
    scheduler: str = ""
    metric: str = ""
    mode: str = ""
    trials: int = 0
    folds: int | None = None
    seeds: int | None = None
    seed: int = 0
    parallel: int | None = None
    gpus_per_trial: float | None = None
    experiment: str = ""

    @property
    def parts(self) -> list[Part]:
        """The runs of each trial; see `parts_of`."""
        return parts_of(self.seed, self.seeds, self.folds)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the record of the sweep, without secrets."""
        return asdict(self) | {"overrides": [redact_override(text) for text in self.overrides]}

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Definition":
        """Restore a definition from `as_json`."""
        known = {item.name: found[item.name] for item in fields(cls) if item.name in found}
        return cls(**known | {"overrides": tuple(found["overrides"])})


@dataclass(frozen=True)
class SweepPlan:
    """A checked definition."""

    definition: Definition
    space: Space
    config: RunConfig  # config that all trials have in common
    rows: tuple[Fold, ...] = ()  # rows of each fold
    folder: RunFolder | None = None  # folder of the sweep to resume; None for a new one


def plan(experiment: type, asked: Definition, *, large: bool = False, split: bool = True) -> SweepPlan:
    """Complete and check the definition of a sweep.

    Args:
        experiment: Class of the experiment.
        asked: Definition from the command.
        large: Allow a grid of any size.
        split: Read the datasets and split their rows into folds, if the sweep has any.

    Raises:
        UsageError, ConfigError: it does not define a sweep, or a value of a parameter is invalid.
        ConfigError, DatasetError: the rows cannot be split into folds.
    """
    if asked.gpus_per_trial is not None and not 0 <= asked.gpus_per_trial < math.inf:
        raise UsageError(f"--gpus-per-trial is {asked.gpus_per_trial:g}; pass a number of GPUs, or a share of one")
    space = parse(asked.overrides)
    if not (space.dimensions or asked.folds or asked.seeds):
        raise UsageError("no parameter has several values; give one some, or add --seeds 5 or --folds 5")
    search = asked.search or ("optuna" if space.size is None else "grid")
    trials = trial_count(space, search, asked.trials or None, large=large)
    if asked.folds and (key := space.find_varying_key(*OF_FOLDS)):
        raise UsageError(f"{key} is the same for all runs of a sweep with folds, because it determines the folds")
    if asked.seeds and space.find_varying_key("cfg.seed"):
        raise UsageError("--seeds trains each trial with cfg.seed and those after it; give cfg.seed a single value")
    overrides = [*space.expand(space.first), *parts_of(0, None, asked.folds)[0].overrides(asked.folds)]
    with conf_of(experiment) as conf:
        check(space, experiment, conf, title=asked.experiment)
        config = load_config(experiment, overrides, conf, title=asked.experiment or None)
    for companion in companions.extensions_of(config.tree["cfg"]):
        companion.refuse_sweep(config.cfg)
    config = replace(config, overrides=space.fixed)
    rows = fold_rows(config) if asked.folds and split else ()
    cfg = config.cfg
    budget = "cfg.max_steps" if cfg.max_steps is not None else space.find_varying_key("cfg.num_epochs", "cfg.max_steps")
    if asked.scheduler == "asha" and budget:
        raise UsageError(f"--scheduler asha compares trials of cfg.num_epochs epochs each; leave out {budget}")
    metric = asked.metric or cfg.monitor
    if not metric:
        raise UsageError(f"by which metric? Pass --metric val/loss --mode min, or set cfg.monitor in {CONF}")
    if not asked.mode and metric != cfg.monitor:
        raise UsageError(f"is the best {metric} the max or the min? Pass --mode; cfg.mode is that of {cfg.monitor}")
    definition = replace(
        asked,
        search=search,
        scheduler=asked.scheduler or "none",
        metric=metric,
        mode=asked.mode or cfg.mode,
        trials=trials,
        seed=cfg.seed,
    )
    return SweepPlan(definition, space, config, tuple(rows))


def merge(stored: Definition, asked: Definition) -> Definition:
    """Return the definition of a sweep to resume, with changed fields from the command."""
    return replace(stored, **asked.changed_fields())


def differences(stored: Definition, resumed: Definition) -> dict[str, str]:
    """Return the old and the new value of each field that a resumed sweep may change only with `--force`, or never."""
    before, after = stored.as_json(), resumed.as_json()
    grown = 0 < (stored.seeds or 0) < (resumed.seeds or 0)
    return {
        name: _format_change(before[name], after[name])
        for name in before
        if name not in CHANGEABLE and before[name] != after[name] and not (name == "seeds" and grown)
    }


def _format_change(before: Any, after: Any) -> str:
    if isinstance(before, list) and {*before} != {*after}:  # without the overrides that both have
        before, after = [item for item in before if item not in after], [item for item in after if item not in before]
    texts = [" ".join(value) or "none" if isinstance(value, list) else str(value) for value in (before, after)]
    return " → ".join(texts)
