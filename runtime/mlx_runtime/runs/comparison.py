"""Compare runs: the best checkpoint of an experiment, and the differences between two runs."""

import math
from collections.abc import Mapping
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.checkpoint_index import best_first, list_checkpoints, position
from mlx_runtime.runs.folder import RunFolder, reading
from mlx_runtime.runs.listing import AskJobs, Row, list_rows, map_concurrently, mode_of, suggest_metric, summarize
from mlx_runtime.runs.tables import format_duration, format_number
from mlx_runtime.storage.files import joined
from mlx_runtime.storage.redaction import redacted_tree

RESOLVED = ("cfg.resume", "cfg.storage_path")
"""Settings that choose a run and do not change what it does. A resumed run stores what they stood for."""


def best(name: str, metric: str | None = None, mode: str | None = None, run: RunFolder | None = None) -> dict[str, Any]:
    """Find the run and the checkpoint of an experiment in which a metric is best, or the checkpoint of one run.

    Metric and mode (`max` or `min`) default to those of the runs. A value that no checkpoint was saved with, like
    the result of a final test, comes with the latest checkpoint of the run. Folds of a cross-validation are left out:
    only their mean compares with other results.
    """
    rows = [row for row in (list_rows(name) if run is None else summarize([run])) if run or row.problem is None]
    if run is not None and rows[0].problem is not None:
        raise StorageError(rows[0].problem)
    where = f"the runs of {name}" if run is None else run.title
    chosen = metric or next((row.monitor for row in reversed(rows) if row.monitor), None)
    if chosen is None:
        raise UsageError(f"cfg.monitor is not set in {where}; pass --metric.{suggest_metric(rows, '')}")
    chosen_mode = mode or mode_of(rows, chosen)
    if chosen_mode is None:
        raise UsageError(f"{chosen} is not monitored in {where}; pass --mode max or --mode min")

    def best_of(row: Row) -> dict[str, Any] | None:
        value: float | None
        epoch: int | None
        path: str | None
        facts = {"metric": chosen, "mode": chosen_mode, "experiment": row.folder.experiment, "run": row.folder.name}
        if saved := best_first(list_checkpoints(row.folder.checkpoints, report=True), chosen, chosen_mode):
            item, value, epoch = saved[0], saved[0].metrics[chosen], saved[0].epoch + 1
            path, step = joined(row.folder.checkpoints, item.name), None if item.finished else item.global_step
        else:
            value, epoch = row.metrics.get(chosen, math.nan), row.epoch
            path, step = (row.record.get("latest") or {}).get("path"), None
        if value is None or math.isnan(value):
            return None
        return facts | {"value": value, "epoch": epoch, "step": step, "checkpoint": path}

    folds = [row for row in rows if row.record.get("fold") and run is None]
    found = [item for item in map_concurrently(best_of, [row for row in rows if row not in folds]) if item is not None]
    if not found and folds:
        sweep = folds[-1].sweep.get("name")
        cure = f"the mean of each trial: mlx xp best {name} {sweep}" if sweep else "compare the means of their values"
        raise UsageError(f"all runs of {name} with {chosen} are folds of a cross-validation; {cure}")
    if not found:
        raise UsageError(f"{chosen} is not recorded in {where}.{suggest_metric(rows, chosen)}")
    sign = 1 if chosen_mode == "max" else -1
    return max(reversed(found), key=lambda item: sign * item["value"])  # the later one of equals


def best_lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `best`, or that of a sweep, for the terminal."""
    epoch = f" ({position({**found, 'epoch': found['epoch'] - 1})})" if found["epoch"] is not None else ""
    spread = f" ± {format_number(found['std'])}" if found.get("std") is not None else ""
    at = f", epoch {found['epoch']}" if "checkpoints" in found else ""
    rows = {found["metric"]: f"{format_number(found['value'])}{spread} ({found['mode']}{at})"}
    if "sweep" in found:
        rows["trial"] = f"{found['trial']} of {found['experiment']}/{found['sweep']}"
        if found["values"]:
            rows["values"] = " ".join(f"{key}={value}" for key, value in found["values"].items())
    rows |= {"run": f"{found['experiment']}/{', '.join(found['runs'] if 'runs' in found else [found['run']])}"}
    lost = f"none of epoch {found['epoch']} is kept; a higher cfg.keep_checkpoints keeps more"
    if "checkpoints" in found:
        rows |= {f"fold {number}": path or lost for number, path in enumerate(found["checkpoints"], 1)}
    else:
        rows["checkpoint"] = f"{found['checkpoint']}{epoch}" if found["checkpoint"] else lost
    if "sweep" in found:
        rows["full run"] = found["command"]
    width = max(len(name) for name in rows) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]


def difference(first: RunFolder, second: RunFolder, ask: AskJobs | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what differs between two runs: `run`, `config` and `metrics`, with one or two values for each name."""
    a, b = (_describe(folder, ask) for folder in (first, second))
    return {
        part: {
            name: {side: values[name] for side, values in (("a", a[part]), ("b", b[part])) if name in values}
            for name in a[part] | b[part]
            if name not in a[part] or name not in b[part] or a[part][name] != b[part][name]
        }
        for part in a
    }


def table(
    first: RunFolder, second: RunFolder, differing: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """Format the result of `difference` as rows of a table."""
    a, b = first.title, second.title
    if a == b:
        a, b = first.location, second.location
    return [
        {"": name, a: _cell(part, values, "a"), b: _cell(part, values, "b")}
        for part, names in differing.items()
        for name, values in names.items()
    ]


def _cell(part: str, values: Mapping[str, Any], side: str) -> str:
    if side not in values:
        return "-"
    value = values[side]
    return format_number(value) if isinstance(value, float) and part != "config" else str(value)


def _describe(folder: RunFolder, ask: AskJobs | None) -> dict[str, dict[str, Any]]:
    """Return facts, config and metrics of a run, each as a flat dict."""
    from mlx_runtime.config.interpolation import parsed

    [row] = summarize([folder], ask)
    if row.problem:
        raise StorageError(row.problem)
    with reading(folder, folder.conf.name):
        config = redacted_tree(parsed(folder.document(folder.conf.name), environment=False))
    record = row.record
    git = record.get("git") or {}
    facts = {
        "status": row.status,
        "epoch": row.epoch,
        f"best {row.monitor}": row.best,
        "duration": format_duration(row.duration_s),
    }
    facts |= {name: record.get(name) for name in ("seed", "workers", "device", "host", "python")}
    facts |= {"commit": git.get("commit"), "uncommitted changes": bool(git.get("diff"))}
    facts |= {f"{name} version": version for name, version in (record.get("packages") or {}).items()}
    settings = {name: value for name, value in _flatten(config).items() if name not in RESOLVED}
    return {"run": facts, "config": settings, "metrics": dict(row.metrics)}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"cfg": {"seed": 0}}` → `{"cfg.seed": 0}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
