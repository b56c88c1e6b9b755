"""Two configs compared over seeds and folds: the difference of their means, with a confidence interval."""

import contextlib
import itertools
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_runtime import companions
from mlx_runtime.config.interpolation import plain_tree
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs.folder import SWEEP, RunFolder, list_runs, read_errors
from mlx_runtime.runs.queries.listing import AskJobs, Row, map_concurrently, suggest_metric, summarize
from mlx_runtime.runs.snapshots import unpack
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.runs.tables import aligned, format_number, plural
from mlx_runtime.storage.documents import from_yaml
from mlx_runtime.storage.redaction import redact_tree
from mlx_runtime.tracking.trackers import flatten

CONFIDENCE, POWER = 0.95, 0.8
"""Probability that the interval covers the true difference, and that as many seeds as recommended settle it."""

FIRST_SEEDS, MOST_SEEDS = 5, 100
"""Number of seeds to recommend if there are too few for an interval, and the maximum."""

Runs = dict[tuple[int, int | None], Any]
"""Runs of a config, as `sweeps.scores.TrialRun`, by seed and fold."""


def interval(
    a: Sequence[float], b: Sequence[float], *, paired: bool, folds: int = 1
) -> tuple[float, float, float, int | None]:
    """Return the difference of the means, B - A, and its interval, by Student's t test, or Welch's if not `paired`.

    The last item is the number of seeds that would settle a difference like this one; None if it is settled, or if that
    takes more than `MOST_SEEDS`.

    Runs of different folds share training rows, so their values are not independent. As in Nadeau and Bengio, Inference
    for the Generalization Error (2003), the factor 1/n of the variance becomes 1/n + 1/(folds - 1), where the latter is
    the ratio of held-out rows to training rows.
    """
    require("scipy", "a comparison")
    from scipy import stats

    shared, size = 1 / (folds - 1) if folds > 1 else 0.0, min(len(a), len(b))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal values have an interval without width
        test = stats.ttest_rel(b, a) if paired else stats.ttest_ind(b, a, equal_var=False)
        low, high = test.confidence_interval(CONFIDENCE)
        variance = np.var(np.subtract(b, a), ddof=1) if paired else np.var(a, ddof=1) + np.var(b, ddof=1)
    difference = float(np.mean(b) - np.mean(a))
    margin = float((high - low) / 2 * math.sqrt(1 + max(len(a), len(b)) * shared))
    seeds = np.arange(size // folds + 1, MOST_SEEDS + 1)
    freedom = (seeds * folds - 1) * (1 if paired else 2)
    needed = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) + stats.t.ppf(POWER, freedom)
    enough = seeds[abs(difference) >= needed * np.sqrt(variance * (1 / (seeds * folds) + shared))]
    # Values of few rows may differ by the same number in all pairs, which does not mean that they always would.
    flat = paired and np.ptp(a) > 0 and np.allclose(np.subtract(b, a), difference, rtol=1e-3, atol=0)
    unsettled = difference != 0 and (flat or margin >= abs(difference))
    return difference, difference - margin, difference + margin, next(map(int, enough[:unsettled]), None)


def compare(
    a: RunFolder, b: RunFolder, metric: str | None = None, mode: str | None = None, ask: AskJobs | None = None
) -> dict[str, Any]:
    """Compare two configs over all of their runs; a sweep stands for its best trial.

    Runs with the same seed and fold are paired if there are at least two such pairs. Otherwise, the groups are compared
    as independent samples. Values are those at the end of the epoch with the best mean, as in the table of a sweep.

    Args:
        a, b: Each stands for all runs of its experiment with the same code and config, except for seed and fold.
        metric: Metric to compare; the default is the one that the runs monitor.
        mode: `max` or `min`; the default is that of the runs that monitor the metric.
        ask: As in `summarize`.

    Raises:
        UsageError: They do not differ, or have no metric in common.
        MlxError: There are too few runs, or they were evaluated on different rows.
    """
    firsts = [_first_run(folder) for folder in (a, b)]
    configs = [_config(first) for first in firsts]
    if configs[0] == configs[1]:
        raise UsageError(f"{a.title} and {b.title} have the same config and code; name runs that differ")
    left_out = dict[str, str]()
    groups = [_runs(first, config, left_out, ask) for first, config in zip(firsts, configs, strict=True)]
    rows = [run.row for runs in groups for run in runs.values()]
    metric, mode = _metric(rows, metric, mode)
    trained, folds = [{*runs} for runs in groups], (rows[0].record.get("fold") or {}).get("folds")
    paired = _select(groups, metric, left_out)
    if few := [first.title for first, runs in zip(firsts, groups, strict=True) if len(runs) < 2]:
        text = f"{few[0]} has one seed to compare, and an interval needs two; train more:"
        raise MlxError("\n".join([text, *_commands(firsts, trained, FIRST_SEEDS, folds)]))
    trials = [companions.part("sweeps.scores").Trial(1, {}, [*runs.values()], metric, mode) for runs in groups]
    if any(trial.epoch is None for trial in trials):
        raise MlxError(f"no epoch has a value of {metric} in all runs of a config; choose another --metric")
    values = [[run.curve(metric)[trial.epoch] for run in trial.runs] for trial in trials]
    difference, low, high, seeds = interval(*values, paired=paired, folds=folds or 1)
    compared = {run.row.folder.title for trial in trials for run in trial.runs}
    return {
        "metric": metric,
        "mode": mode,
        **{
            name: {
                "runs": [run.row.folder.title for run in trial.runs],
                "epoch": trial.epoch,
                "values": found,
                "mean": float(np.mean(found)),
                "std": float(np.std(found, ddof=1)),
            }
            for name, trial, found in zip("ab", trials, values, strict=True)
        },
        "config": {
            key: both
            for key in configs[0] | configs[1]
            if (both := [config.get(key) for config in configs])[0] != both[1]
        },
        "paired": paired,
        "difference": difference,
        "interval": [low, high],
        "confidence": CONFIDENCE,
        "better": None if seeds or low <= 0 <= high else "ab"[(low > 0) == (mode == "max")],
        "more_seeds": seeds and seeds - min(map(len, values)) // (folds or 1),
        "commands": _commands(firsts, trained, seeds or 0, folds),
        "left_out": {title: reason for title, reason in left_out.items() if title not in compared},
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `compare` for the terminal."""
    rows = {"metric": f"{found['metric']} ({found['mode']})"}
    for name in "ab":
        group = found[name]
        spread = f"{format_number(group['mean'])} ± {format_number(group['std'])}"
        rows[name.upper()] = f"{spread}  {group['runs'][0]} and {len(group['runs']) - 1} more, epoch {group['epoch']}"
    rows |= {key: f"{one} → {other}" for key, (one, other) in found["config"].items()}
    pairs = f"{plural(len(found['a']['runs']), 'pair')} of the same seed"
    how = pairs if found["paired"] else "unpaired, because fewer than two seeds are the same"
    low, high = map(format_number, found["interval"])
    rows["B - A"] = f"{format_number(found['difference'])}, {CONFIDENCE:.0%} interval {low} to {high} ({how})"
    rows["result"] = f"not settled: for a difference this small, {MOST_SEEDS} seeds would not be enough"
    if found["better"]:
        rows["result"] = f"{found['better'].upper()} is better"
    elif found["more_seeds"]:
        more = plural(found["more_seeds"], "more seed")
        rows["result"] = f"not enough runs: {more} would settle it, if the difference is as measured"
    return [*aligned(rows), *found["commands"]]


def _first_run(folder: RunFolder) -> RunFolder:
    """Return a run, or the first run of the best trial of a sweep."""
    if not folder.name.startswith(SWEEP):
        return folder
    first: RunFolder = companions.part("sweeps.results").SweepResult(folder).best.started[0][0].folder
    return first


def _config(folder: RunFolder) -> dict[str, Any]:
    """Return a digest of a run's code, and its config by key, as if seed, fold and storage were always the same."""
    same = {"seed": 0, "storage_path": None, "cross_validation": {"fold": None}}
    with read_errors(folder, folder.conf.name):
        tree = from_yaml(folder.document(folder.conf.name))
        try:
            tree.merge_with({"cfg": same})  # before values that refer to them, like `${cfg.seed}`, are resolved
        except TypeError as error:  # from OmegaConf
            raise ValueError("cfg or its cross_validation is not a mapping") from error
        config = dict(flatten(redact_tree(plain_tree(tree, environment=False))))
    return config | {"code": code_digest(unpack(folder))[:12]}


def _readable_config(folder: RunFolder) -> dict[str, Any]:
    with contextlib.suppress(MlxError):  # damaged, or about to begin
        return _config(folder)
    return {}


def _runs(first: RunFolder, config: Mapping[str, Any], left_out: dict[str, str], ask: AskJobs | None) -> Runs:
    """Return the finished runs of a config; of several with the same seed and fold, the latest."""
    folders = list_runs(first.root, first.experiment)
    found = dict(zip(folders, map_concurrently(_readable_config, folders), strict=True))
    same = [folder for folder, other in found.items() if {**other, "code": ""} == {**config, "code": ""}]
    scores, runs = companions.part("sweeps.scores"), Runs()
    for row in summarize(same, ask):
        key, title = (row.record.get("seed") or 0, (row.record.get("fold") or {}).get("fold")), row.folder.title
        if row.status != "SUCCEEDED":
            left_out[title] = row.status
        elif found[row.folder]["code"] != config["code"]:
            left_out[title] = f"other code than {first.title}"
        else:
            if key in runs:
                left_out[runs[key].row.folder.title] = f"{title} is newer, with the same seed and fold"
            runs[key] = scores.TrialRun(row.folder.name, row.status, row, scores.read_epochs(row.folder))
    if not runs:
        raise MlxError(f"no run with the config of {first.title} has finished; it is {left_out[first.title]}")
    return runs


def _metric(rows: Sequence[Row], metric: str | None, mode: str | None) -> tuple[str, str]:
    """Return the metric to compare and its mode, which the runs that monitor it agree on."""
    if metric is None or mode is None:
        monitored = {(row.monitor or "none", row.record.get("mode") or "min") for row in rows}
        chosen = {item for item in monitored if metric in (None, item[0]) and mode in (None, item[1])}
        if len(chosen) != 1:
            names = " and ".join(f"{name} ({known})" for name, known in sorted(monitored))
            raise UsageError(f"by which metric? The runs monitor {names}; pass --metric and --mode")
        [(metric, mode)] = chosen
    return metric, mode


def _select(groups: Sequence[Runs], metric: str, left_out: dict[str, str]) -> bool:
    """Leave out runs that cannot be compared. Return True if the others are pairs, in the same order in both groups."""
    rows = [run.row for runs in groups for run in runs.values()]
    for runs in groups:
        lost = [key for key, run in runs.items() if not any(map(math.isfinite, run.curve(metric).values()))]
        left_out |= {runs.pop(key).row.folder.title: f"no finite {metric}" for key in lost}
        if not runs:
            raise UsageError(f"no run like {[*left_out][-1]} has a finite {metric}.{suggest_metric(rows, metric)}")
    shared = [key for key in groups[0] if key in groups[1]]
    for runs in groups if len(shared) > 1 else ():
        others = [runs.pop(key).row.folder.title for key in runs.keys() - {*shared}]
        left_out |= dict.fromkeys(others, "no run of the other config has its seed and fold")
        runs |= {key: runs.pop(key) for key in shared}
    stage = metric.rpartition("/")[0]
    sizes = [
        {(run.row.record.get("datasets") or {}).get(stage, {}).get("rows") for run in runs.values()} for runs in groups
    ]
    if sizes[0] != sizes[1]:
        counts = " and ".join(", ".join(map(str, sorted(size, key=str))) for size in sizes)
        raise MlxError(f"the configs were evaluated on {counts} rows of {stage}; their values cannot be compared")
    return len(shared) > 1


def _commands(
    firsts: Sequence[RunFolder], trained: Sequence[set[tuple[int, int | None]]], seeds: int, folds: int | None
) -> list[str]:
    """Return the commands that train the seeds that each config lacks for a number of pairs.

    Seeds of the other config come first, then new ones.
    """
    parts = [*range(folds)] if folds else [None]
    known = [{seed for seed, _ in own if all((seed, fold) in own for fold in parts)} for own in trained]
    old = sorted(known[0] | known[1], key=lambda seed: (seed not in known[0] & known[1], seed))
    new = max(old, default=-1) + 1
    wanted, found = {*[*old, *range(new, new + seeds)][:seeds]}, []
    for first, own in zip(firsts, known, strict=True):
        for _, block in itertools.groupby(enumerate(sorted(wanted - own)), lambda item: item[1] - item[0]):
            (_, seed), *more = block
            words = ["--from", first.title, f"cfg.seed={seed}", "--seeds", str(1 + len(more))]
            found.append(shlex.join(["mlx", "train", "sweep", *words, *(["--folds", str(folds)] if folds else [])]))
    return found
