"""Two configs compared over seeds and folds: the difference of their means, with a confidence interval."""

import contextlib
import itertools
import math
import shlex
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_runtime import companions
from mlx_runtime.config.interpolation import plain_tree
from mlx_runtime.errors import MlxError, StorageError, UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.folder import SWEEP, RunFolder, list_runs, read_errors
from mlx_runtime.runs.queries.listing import AskJobs, map_concurrently, suggest_metric, summarize
from mlx_runtime.runs.snapshots import unpack
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.runs.tables import aligned, format_number, plural
from mlx_runtime.storage.documents import from_yaml
from mlx_runtime.storage.redaction import redact_tree
from mlx_runtime.tracking.trackers import flatten

CONFIDENCE = 0.95
"""Probability with which the interval covers the true difference."""

POWER = 0.8
"""Probability with which the recommended number of seeds settles a difference like the measured one."""

FIRST_SEEDS, MOST_SEEDS = 5, 100
"""Number of seeds to recommend if there are too few for an interval, and the maximum."""

Key = tuple[int, int | None]
"""Seed and fold of a run, from 0."""


@dataclass
class Group:
    """The finished runs of one config and code.

    Attributes:
        first: The run that stands for them.
        config: The values of their conf.yaml by key.
        runs: Runs to compare, as `sweeps.scores.TrialRun`.
        trained: Seeds and folds of all finished runs.
        left_out: Runs that are not compared, with the reason.
    """

    first: RunFolder
    config: dict[str, Any]
    runs: dict[Key, Any] = field(default_factory=dict)
    trained: set[Key] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def folds(self) -> int | None:
        """Number of folds in the cross-validation of the runs, if there is one."""
        folds: int | None = self.config.get("cfg.cross_validation.folds")
        return folds

    @property
    def titles(self) -> set[str]:
        """Names of the runs to compare."""
        return {run.row.folder.title for run in self.runs.values()}

    def leave_out(self, key: Key, reason: str) -> None:
        """Do not compare a run."""
        self.left_out[self.runs.pop(key).row.folder.title] = reason


class Interval(NamedTuple):
    """The difference of two means, its confidence interval, and how many seeds of each group it takes to exclude 0."""

    difference: float
    low: float
    high: float
    seeds: int | None  # None if 0 is excluded, or if it takes more than `MOST_SEEDS`


def interval(a: Sequence[float], b: Sequence[float], *, paired: bool, folds: int = 1) -> Interval:
    """Return the difference of the means, B - A, with the interval of Student's t test, or Welch's if not `paired`.

    Runs of different folds share training rows, so their values are not independent. As in Nadeau and Bengio, Inference
    for the Generalization Error (2003), the factor 1/n of the variance becomes 1/n + 1/(folds - 1), where the latter is
    the ratio of held-out rows to training rows.
    """
    import numpy as np
    from scipy import stats

    shared = 1 / (folds - 1) if folds > 1 else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal values have an interval without width
        test = stats.ttest_rel(b, a) if paired else stats.ttest_ind(b, a, equal_var=False)
        low, high = test.confidence_interval(CONFIDENCE)
        variance = np.var(np.subtract(b, a), ddof=1) if paired else np.var(a, ddof=1) + np.var(b, ddof=1)
    difference = float(np.mean(b) - np.mean(a))
    margin = float((high - low) / 2 * math.sqrt(1 + max(len(a), len(b)) * shared))

    seeds = np.arange(min(len(a), len(b)) // folds + 1, MOST_SEEDS + 1)
    freedom = (seeds * folds - 1) * (1 if paired else 2)
    needed = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) + stats.t.ppf(POWER, freedom)
    enough = seeds[abs(difference) >= needed * np.sqrt(variance * (1 / (seeds * folds) + shared))]
    # Values of few rows may differ by the same number in all pairs, which does not mean that they always would.
    flat = paired and np.ptp(a) > 0 and np.allclose(np.subtract(b, a), difference, rtol=1e-6, atol=0)
    unsettled = difference != 0 and (flat or margin >= abs(difference))
    more = int(enough[0]) if unsettled and len(enough) else None
    return Interval(difference, difference - margin, difference + margin, more)


def compare(
    a: RunFolder, b: RunFolder, metric: str | None = None, mode: str | None = None, ask: AskJobs | None = None
) -> dict[str, Any]:
    """Compare two configs over all of their runs; a sweep stands for its best trial.

    Runs with the same seed and fold are paired if there are at least two such pairs. Otherwise, the groups are compared
    as independent samples.

    Args:
        a, b: Each stands for all runs of its experiment with the same code and config, except for seed and fold.
        metric: Metric to compare; the default is the one that the runs monitor.
        mode: `max` or `min`; the default is that of the runs that monitor the metric.
        ask: As in `summarize`.

    Raises:
        UsageError: They do not differ, or have no metric in common.
        MlxError: There are too few runs, or they were evaluated on different rows.
    """
    require("scipy", "a comparison")
    groups = [_group(_representative(folder), ask) for folder in (a, b)]
    if groups[0].first == groups[1].first or groups[0].titles & groups[1].titles:
        raise UsageError(f"{a.title} and {b.title} have the same config and code; name runs that differ")
    metric, mode = _metric(groups, metric, mode)
    paired = _select(groups, metric)
    measured = [_values(group, metric, mode) for group in groups]
    found = interval(*(values for _, values in measured), paired=paired, folds=groups[0].folds or 1)
    missing = _missing(groups, found.seeds or 0)
    config = {key: [group.config.get(key) for group in groups] for key in groups[0].config | groups[1].config}
    left_out = groups[0].left_out | groups[1].left_out
    return {
        "metric": metric,
        "mode": mode,
        **{name: _facts(group, *item) for name, group, item in zip("ab", groups, measured, strict=True)},
        "config": {key: values for key, values in config.items() if values[0] != values[1]},
        "paired": paired,
        "difference": found.difference,
        "interval": [found.low, found.high],
        "confidence": CONFIDENCE,
        "better": None if found.seeds or found.low <= 0 <= found.high else "ab"[(found.low > 0) == (mode == "max")],
        "more_seeds": max(map(len, missing)) or None,
        "commands": _commands(groups, missing),
        "left_out": {title: why for title, why in left_out.items() if title not in groups[0].titles | groups[1].titles},
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `compare` for the terminal."""
    rows = {"metric": f"{found['metric']} ({found['mode']})"}
    for name in "ab":
        group = found[name]
        spread = f"{format_number(group['mean'])} ± {format_number(group['std'])}"
        at = f", epoch {group['epoch']}" if group["epoch"] else ""
        rows[name.upper()] = f"{spread}  {group['runs'][0]} and {len(group['runs']) - 1} more{at}"
    rows |= {key: f"{one} → {other}" for key, (one, other) in found["config"].items()} or {"code": "differs"}
    low, high = map(format_number, found["interval"])
    pairs = plural(len(found["a"]["runs"]), "pair")
    how = f"{pairs} of the same seed" if found["paired"] else "Welch's: fewer than two seeds are the same"
    rows["B - A"] = f"{format_number(found['difference'])}, {CONFIDENCE:.0%} interval {low} to {high} ({how})"
    if found["better"]:
        rows["result"] = f"{found['better'].upper()} is better"
    elif found["interval"] == [0, 0]:
        rows["result"] = "the same values in both"
    elif found["more_seeds"]:
        more = plural(found["more_seeds"], "more seed")
        rows["result"] = f"not enough runs: {more} would settle it, if the difference is as measured"
    else:
        rows["result"] = f"not settled: for a difference this small, {MOST_SEEDS} seeds would not be enough"
    return [*aligned(rows), *found["commands"]]


def _representative(folder: RunFolder) -> RunFolder:
    """Return a run, or the first run of the best trial of a sweep."""
    if not folder.name.startswith(SWEEP):
        return folder
    first: RunFolder = companions.part("sweeps.results").SweepResult(folder).best.started[0][0].folder
    return first


def _group(first: RunFolder, ask: AskJobs | None) -> Group:
    """Collect the runs with the same config and code; of several with the same seed and fold, the latest."""
    new_run = companions.part("sweeps.scores").TrialRun
    group, code = Group(first, _config(first)), _code(first)
    folders = [folder for folder in list_runs(first.root, first.experiment) if folder.has_begun()]
    configs = map_concurrently(_readable_config, folders)
    same = [folder for folder, config in zip(folders, configs, strict=True) if config == group.config]
    for row in summarize(same, ask):
        key = row.record.get("seed") or 0, (row.record.get("fold") or {}).get("fold")
        if row.status != "SUCCEEDED":
            group.left_out[row.folder.title] = row.status
        elif _code(row.folder) != code:
            group.left_out[row.folder.title] = f"other code than {first.title}"
        else:
            if key in group.runs:
                group.leave_out(key, f"{row.folder.title} is newer and has the same {_text(key)}")
            group.runs[key] = new_run(row.folder.name, row.status, row)
    group.trained = {*group.runs}
    if not group.runs:
        left = ", ".join(f"{title}: {reason}" for title, reason in group.left_out.items())
        raise MlxError(f"no run with the config of {first.title} has finished ({left})")
    return group


def _config(folder: RunFolder) -> dict[str, Any]:
    """Return the values of a conf.yaml by key, as if seed, fold and storage were the same in all runs."""
    with read_errors(folder, folder.conf.name):
        tree = from_yaml(folder.document(folder.conf.name))
        cfg = tree.get("cfg")
        if not isinstance(cfg, MutableMapping):
            raise ValueError("it has no group cfg")
        cfg.update(seed=0, storage_path=None)  # values that refer to them, like `${cfg.seed}`, follow
        if isinstance(cfg.get("cross_validation"), Mapping):
            cfg["cross_validation"]["fold"] = None
        return dict(flatten(redact_tree(plain_tree(tree, environment=False))))


def _readable_config(folder: RunFolder) -> dict[str, Any] | None:
    with contextlib.suppress(StorageError):
        return _config(folder)
    return None


def _code(folder: RunFolder) -> str | None:
    """Return a digest of the stored code of a run; None if it has none."""
    with contextlib.suppress(MlxError):
        return code_digest(unpack(folder))
    return None


def _metric(groups: Sequence[Group], metric: str | None, mode: str | None) -> tuple[str, str]:
    """Return the metric to compare, and its mode."""
    rows = [run.row for group in groups for run in group.runs.values()]
    monitored = {row.monitor for row in rows if row.monitor}
    if metric is None and len(monitored) != 1:
        names = " and ".join(sorted(monitored)) or "none"
        raise UsageError(f"by which metric? The runs monitor {names}; pass --metric")
    metric = metric or monitored.pop()
    modes = {row.record.get("mode") or "min" for row in rows if row.monitor == metric}
    if mode is None and len(modes) != 1:
        cause = "the runs have different modes" if modes else "no run monitors it"
        raise UsageError(f"is the best {metric} the max or the min? Pass --mode, because {cause}")
    return str(metric), mode or modes.pop()


def _select(groups: Sequence[Group], metric: str) -> bool:
    """Leave out runs that cannot be compared. Return True if the others are pairs, in the same order in both groups."""
    read = companions.part("sweeps.scores").read_epochs
    for group in groups:
        rows = [run.row for run in group.runs.values()]
        for key, run in [*group.runs.items()]:
            run.epochs = read(run.row.folder)
            if not any(map(math.isfinite, run.curve(metric).values())):
                group.leave_out(key, f"no finite {metric}")
        if not group.runs:
            raise UsageError(f"no run like {group.first.title} has a finite {metric}.{suggest_metric(rows, metric)}")
    shared = [key for key in groups[0].runs if key in groups[1].runs]
    paired = len(shared) > 1
    for group, other in (groups, groups[::-1]) if paired else ():
        for key in group.runs.keys() - {*shared}:
            group.leave_out(key, f"no run like {other.first.title} has {_text(key)}")
        group.runs = {key: group.runs[key] for key in shared}
    if few := [group for group in groups if len(group.runs) < 2]:
        reason = f"{few[0].first.title} has one seed to compare, and an interval needs two; train more"
        raise MlxError("\n".join([f"{reason}:", *_commands(groups, _missing(groups, FIRST_SEEDS))]))
    stage = metric.rpartition("/")[0]
    rows_of = [[_evaluated_rows(run.row.record, stage, paired) for run in group.runs.values()] for group in groups]
    if rows_of[0] != rows_of[1] if paired else {*rows_of[0]} != {*rows_of[1]}:
        a, b = (group.first.title for group in groups)
        raise MlxError(f"{a} and {b} were evaluated on different rows of {stage}; their values cannot be compared")
    return paired


def _evaluated_rows(record: Mapping[str, Any], stage: str, paired: bool) -> tuple[Any, Any]:
    """Return the number of rows of a dataset, and the fold that is held out or, if seeds differ, how many there are."""
    rows = (record.get("datasets") or {}).get(stage, {}).get("rows")
    return rows, (record.get("fold") or {}).get("rows" if paired else "folds")


def _values(group: Group, metric: str, mode: str) -> tuple[int | None, list[float]]:
    """Return the epoch with the best mean, as in the table of a sweep, and the values of the runs at its end.

    If the runs have no such epoch in common, it is None, and each value is the best one of its run.
    """
    runs = [*group.runs.values()]
    epoch: int | None = companions.part("sweeps.scores").Trial(1, {}, runs, metric, mode).epoch
    curves = [run.curve(metric) for run in runs]
    if epoch is None:
        return None, [max(curve.values(), key=lambda value: score(value, mode)) for curve in curves]
    return epoch, [curve[epoch] for curve in curves]


def _facts(group: Group, epoch: int | None, values: Sequence[float]) -> dict[str, Any]:
    import numpy as np

    return {
        "runs": [run.row.folder.title for run in group.runs.values()],
        "epoch": epoch,
        "values": [*values],
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)),
    }


def _missing(groups: Sequence[Group], seeds: int) -> list[list[int]]:
    """Return the seeds that each group lacks for a number of pairs: first those of both groups, then new ones."""
    trained = [
        {seed for seed, _ in group.trained if all((seed, fold) in group.trained for fold in range(group.folds or 0))}
        for group in groups
    ]
    known = sorted(trained[0] | trained[1], key=lambda seed: (sum(seed not in own for own in trained), seed))
    wanted = [*known, *range(max(known, default=-1) + 1, max(known, default=-1) + 1 + seeds)][:seeds]
    return [sorted(set(wanted) - own) for own in trained]


def _commands(groups: Sequence[Group], missing: Sequence[Sequence[int]]) -> list[str]:
    """Return the commands that train these seeds of each group."""
    found = []
    for group, seeds in zip(groups, missing, strict=True):
        folds = ["--folds", str(group.folds)] if group.folds else []
        for _, block in itertools.groupby(enumerate(seeds), lambda item: item[1] - item[0]):
            first, *others = [seed for _, seed in block]
            words = ["--from", group.first.title, f"cfg.seed={first}", "--seeds", str(1 + len(others)), *folds]
            found.append(shlex.join(["mlx", "train", "sweep", *words]))
    return found


def _text(key: Key) -> str:
    seed, fold = key
    return f"seed {seed}" if fold is None else f"seed {seed} and fold {fold + 1}"
