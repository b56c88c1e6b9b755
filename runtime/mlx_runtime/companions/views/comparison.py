"""Two configs compared over seeds and folds: the mean of their differences, with a confidence interval."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_runtime import companions
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs.folder import SWEEP, RunFolder, list_runs, read_errors
from mlx_runtime.runs.queries.listing import AskJobs, map_concurrently, suggest_metric, summarize
from mlx_runtime.runs.records import LIVING, load_record
from mlx_runtime.runs.snapshots import unpack
from mlx_runtime.runs.sources import changed_files, code_digest
from mlx_runtime.runs.tables import aligned, format_number, plural
from mlx_runtime.storage.documents import from_plain_yaml
from mlx_runtime.storage.redaction import redact_tree
from mlx_runtime.tracking.trackers import flatten

CONFIDENCE, POWER = 0.95, 0.8
"""Probability that the interval covers the true difference, and that as many seeds as recommended settle it."""

FIRST_SEEDS, MOST_SEEDS = 5, 100
"""Minimum number of seeds for an interval, and the maximum to recommend."""

OF_RUN = ("cfg.seed", "cfg.storage_path", "cfg.cross_validation.fold")
"""Settings that differ between runs of the same config."""

ByPart = dict[tuple[Any, ...], Any]
"""Facts by seed, fold and, for those that are compared, the digest or the number of evaluated rows."""


@np.errstate(all="ignore")  # of values near the largest float
def interval(a: Sequence[float], b: Sequence[float], folds: int = 1) -> tuple[float, float, int | None]:
    """Return the confidence interval of the mean of B - A, by a paired t test; it has no width if all pairs agree.

    The last item is the number of seeds that would settle a difference like this one; None for more than `MOST_SEEDS`.

    Runs of different folds share training rows, so their values are not independent. As in Nadeau and Bengio, Inference
    for the Generalization Error (2003), the factor 1/n of the variance becomes 1/n + 1/(folds - 1), where the latter is
    the ratio of held-out rows to training rows.
    """
    require("scipy", "a comparison")
    from scipy import stats

    differences = np.subtract(b, a)
    difference, pairs = float(np.mean(differences)), len(differences)
    if np.ptp(differences) <= 1e-6 * np.max(np.abs([a, b])):  # the same, but for rounding to 32 bits
        return difference, difference, None
    seeds = np.arange(pairs // folds + 1, MOST_SEEDS + 1)
    counts = np.array([pairs, *(seeds * folds)])
    errors = np.std(differences, ddof=1) * np.sqrt(1 / counts + (1 / (folds - 1) if folds > 1 else 0))
    margins = errors * stats.t.ppf((1 + CONFIDENCE) / 2, counts - 1)
    enough = seeds[(abs(difference) >= margins + errors * stats.t.ppf(POWER, counts - 1))[1:]]
    return difference - float(margins[0]), difference + float(margins[0]), next(map(int, enough), None)


@np.errstate(all="ignore")
def compare(
    a: RunFolder, b: RunFolder, metric: str | None = None, mode: str | None = None, ask: AskJobs | None = None
) -> dict[str, Any]:
    """Compare two configs over all seeds and folds that both have; a sweep stands for its best trial.

    Values are those at the end of the epoch with the best mean, as in the table of a sweep; but if runs have recorded
    the metric in different epochs, because they stopped early, for example, each has its own best value.

    Args:
        a, b: Each stands for all runs of its experiment with the same code and config, except for seed and fold.
        metric: Metric to compare; the default is the one that A monitors.
        mode: `max` or `min`; the default is that of A or B, if it monitors the metric.
        ask: As in `summarize`.

    Raises:
        UsageError: They do not differ, or it is unknown by which metric.
        MlxError: A or B cannot be read, or they have different numbers of folds.
    """
    scores, results, left_out = companions.part("sweeps.scores"), companions.part("sweeps.results"), dict[str, Any]()
    firsts: list[RunFolder] = [
        results.SweepResult(folder).best.started[0][0].folder if folder.name.startswith(SWEEP) else folder
        for folder in (a, b)
    ]
    records, configs = [load_record(first) for first in firsts], [_config(first) for first in firsts]
    codes = [_code(first) for first in firsts]
    if configs[0] == configs[1] and codes[0] == codes[1]:
        raise UsageError(f"{a.title} and {b.title} have the same config and code; name runs that differ")
    metric = metric or records[0].get("monitor") or ""
    mode = mode or next((one.get("mode") or "min" for one in records if one.get("monitor") == metric), None)
    if not metric or mode is None:
        raise UsageError(f"{firsts[0].title} monitors {records[0].get('monitor')}; pass --metric val/loss --mode min")
    found = [_runs(*side, metric, left_out, ask) for side in zip(firsts, configs, codes, strict=True)]
    groups, trained = zip(*found, strict=True)
    runs = {run.row.folder.title: run for group in groups for run in group.values()}
    if len(sizes := {(run.row.record.get("fold") or {}).get("folds") or 1 for run in runs.values()} or {1}) > 1:
        raise MlxError(f"the runs have {' and '.join(map(str, sorted(sizes)))} folds; compare runs with equally many")
    pairs, folds = [key for key in reversed(groups[0]) if key in groups[1]], max(sizes)
    curves = [[group[key].curve(metric) for key in pairs] for group in groups]
    together = all(len({*map(tuple, side)}) == 1 for side in curves)
    means = [{epoch: np.mean([curve[epoch] for curve in side]) for epoch in side[0]} for side in curves if together]
    epochs = [scores.best_epoch(side, mode) for side in means] or [None, None]
    values = [
        [curve[epoch if all(epochs) else scores.best_epoch(curve, mode)] for curve in side]
        for side, epoch in zip(curves, epochs, strict=True)
    ]
    low, high, needed = (
        interval(values[0], values[1], folds)
        if (seeds := len(pairs) // folds) >= FIRST_SEEDS
        else (-math.inf, math.inf, FIRST_SEEDS)
    )
    better = "ab"[(low > 0) == (mode == "max")] if low < high and not low <= 0 <= high else None
    options = [*(["--folds", str(folds)] if folds > 1 else []), "--metric", metric, "--mode", mode]
    titles = [[group[key].row.folder.title for key in pairs] for group in groups]
    left_out |= dict.fromkeys(runs, "the other config lacks its seed, fold or rows")
    return {
        "metric": metric,
        "mode": mode,
        "folds": folds,
        **{name: {"runs": own, "values": value} for name, own, value in zip("ab", titles, values, strict=True)},
        "epochs": epochs if all(epochs) else None,
        "code": codes,
        "config": {
            key: own
            for key in configs[0] | configs[1]
            if (own := [config.get(key, "") for config in configs])[0] != own[1]
        },
        "interval": [low, high],
        "better": better,
        "result": f"{better.upper()} is better"
        if better
        else "not settled: the seeds do not differ"
        if low == high
        else f"not settled with {seeds} of {needed} seeds; compare once, after the others have finished"
        if needed
        else f"not settled: for a difference this small, {MOST_SEEDS} seeds would not be enough"
        + (f" with {folds} folds, which share training rows" if folds > 1 else ""),
        "commands": _commands(firsts, trained, needed * folds - len(pairs), folds, options)
        if needed and not better
        else [],
        "left_out": {title: left_out[title] for title in sorted({*left_out} - {*titles[0], *titles[1]})},
    }


@np.errstate(all="ignore")
def lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `compare` for the terminal."""
    changes = [("code", found["code"]), *found["config"].items()]
    rows = {key: f"{one} → {other}" for key, (one, other) in changes if one != other}
    rows |= {f"without {title}": reason for title, reason in found["left_out"].items()}
    rows["metric"] = f"{found['metric']} ({found['mode']})"
    for index, name in enumerate("ab"):
        values, [first, *others] = found[name]["values"], found[name]["runs"] or [""]
        if others:
            mean, deviation = format_number(np.mean(values)), format_number(np.std(values, ddof=1))
            epoch = f"epoch {found['epochs'][index]}" if found["epochs"] else "best epoch of each run"
            rows[name.upper()] = f"{mean} ± {deviation}  {first} and {len(others)} more, {epoch}"
    if math.isfinite(found["interval"][0]):
        mean, ends = format_number(np.mean(found["interval"])), " to ".join(map(format_number, found["interval"]))
        pairs = f"{plural(len(found['a']['runs']), 'pair')} of the same seed{' and fold' if found['folds'] > 1 else ''}"
        rows["B - A"] = f"{mean}, {CONFIDENCE:.0%} interval {ends} ({pairs})"
    return [*aligned(rows | {"result": found["result"]}), *found["commands"]]


def _config(folder: RunFolder) -> dict[str, str]:
    """Return the config of a run as Python code by key, because `1` and `true` are equal. Keep `${cfg.seed}`."""
    with read_errors(folder, folder.conf.name):
        config = redact_tree(from_plain_yaml(folder.document(folder.conf.name)))
    return {key: repr(value) for key, value in flatten(config) if key not in OF_RUN}


def _code(folder: RunFolder) -> str:
    """Return a digest of a run's code."""
    return code_digest(unpack(folder))[:12]


def _or_error(read: Callable[[RunFolder], Any], folder: RunFolder) -> Any:
    """Return the result of `read`, or the error why a run cannot be read."""
    try:
        return read(folder)
    except MlxError as error:
        return error


def _runs(
    first: RunFolder, config: Mapping[str, str], code: str, metric: str, left_out: dict[str, Any], ask: AskJobs | None
) -> tuple[ByPart, ByPart]:
    """Return the runs of a config that can be compared, latest first, and all that were started with the same code.

    Name the others in `left_out`. `unpack` is not called in threads.
    """
    scores, runs, trained = companions.part("sweeps.scores"), ByPart(), ByPart()
    folders = list_runs(first.root, first.experiment)
    found = dict(zip(folders, map_concurrently(partial(_or_error, _config), folders), strict=True))
    left_out |= {folder.title: str(other) for folder, other in found.items() if isinstance(other, MlxError)}
    rows = summarize([folder for folder, other in found.items() if other == config], ask)
    for row in reversed(rows):
        own, fold = _or_error(_code, row.folder), row.record.get("fold") or {}
        run = scores.TrialRun(row.folder.name, row.status, row, scores.read_epochs(row.folder))
        rows_of = fold or (row.record.get("datasets") or {}).get(metric.rpartition("/")[0]) or {}
        key = row.record.get("seed") or 0, fold.get("fold"), rows_of.get("rows")
        if own == code:
            trained.setdefault(key[:2], row.status in LIVING)
        if reason := (
            row.problem
            or (own != code and f"other code than {first.title}: {own}")
            or (row.status != "SUCCEEDED" and row.status)
            or (not any(map(math.isfinite, run.curve(metric).values())) and f"no finite {metric}")
            or (key in runs and f"{runs[key].row.folder.title} is newer, with the same seed and fold")
        ):
            left_out[row.folder.title] = reason
        else:
            runs[key] = run
    if not runs and f"no finite {metric}" in left_out.values():
        raise UsageError(f"no run like {first.title} has a finite {metric}.{suggest_metric(rows, metric)}")
    return runs, trained


def _commands(
    firsts: Sequence[RunFolder], trained: Sequence[ByPart], missing: int, folds: int, options: Sequence[str]
) -> list[str]:
    """Return the commands that train a number of missing pairs, without those that train now.

    They begin with the seed after those that both configs have, and leave out the first seeds that only one has.
    """
    shared, found = trained[0].keys() & trained[1].keys(), list[str]()
    start = max((seed for seed, _ in shared), default=-1) + 1
    end = start + -(-(missing - sum(trained[0][key] or trained[1][key] for key in shared)) // folds)
    for first, own in zip(firsts, trained, strict=True):
        begin = next((seed for seed in range(start, end) if seed not in {known for known, _ in own}), end)
        if begin < end:
            words = ["--from", first.title, f"cfg.seed={begin}", "--seeds", str(end - begin), *options]
            found.append(
                f"first check out the code of {first.title}"
                if any(name.endswith(".py") for name in changed_files(Path.cwd(), first))
                else shlex.join(["mlx", "train", "sweep", *words])
            )
    return found
