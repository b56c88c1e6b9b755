"""The best checkpoint of an experiment or of a run, by a metric."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.checkpoints.index import best_first, list_checkpoints, position, score
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.listing import Row, list_rows, map_concurrently, mode_of, suggest_metric, summarize
from mlx_runtime.runs.tables import aligned, format_number
from mlx_runtime.storage.files import join_path

MORE = "a higher cfg.keep_checkpoints keeps more"


def best(
    name: str,
    metric: str | None = None,
    mode: str | None = None,
    run: RunFolder | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Find the run and the checkpoint of an experiment with the best value of a metric, or the checkpoint of one run.

    Metric and mode (`max` or `min`) default to those of the runs. For a value without a checkpoint, like the result of
    a final test, the latest checkpoint of the run is returned. Folds of a cross-validation are left out, because only
    their mean is comparable with other results. `warn` receives a line about them.
    """
    listed = list_rows(name) if run is None else summarize([run])
    rows = [row for row in listed if row.problem is None]
    if listed and not rows:
        raise StorageError(str(listed[-1].problem))
    where = f"the runs of {name}" if run is None else run.title
    monitored = [row.monitor for row in rows if row.monitor]
    recorded = [row.monitor for row in rows if row.monitor and row.value(row.monitor) is not None]
    chosen = metric or next(reversed(recorded or monitored), None)
    if metric is None and len(set(monitored)) > 1:
        warn(f"the runs of {name} monitor {' and '.join(sorted(set(monitored)))}; this is by {chosen}, see --metric")
    if chosen is None:
        raise UsageError(f"cfg.monitor is not set in {where}; pass --metric.{suggest_metric(rows, '')}")
    chosen_mode = mode or mode_of(rows, chosen)
    if chosen_mode is None:
        raise UsageError(f"{chosen} is not monitored in {where}; pass --mode max or --mode min")
    folds = [row for row in rows if row.record.get("fold") and run is None]
    others = [row for row in rows if row not in folds]
    found = [item for item in map_concurrently(partial(_best_of, chosen, chosen_mode), others) if item is not None]
    if folds:
        see = f"; see: mlx xp best {name} {folds[-1].sweep['name']}" if folds[-1].sweep else ""
        note = f"folds of a cross-validation are not compared{see}"
        if not found:
            raise UsageError(f"{chosen} is recorded in no other run of {name}, and {note}")
        warn(note)
    if not found:
        if lost := [row.folder for row in rows if row.value(chosen) is not None]:
            raise UsageError(f"{lost[-1].title} has no readable checkpoint")
        if any(chosen in row.metrics for row in rows):
            raise UsageError(f"no value of {chosen} in {where} is finite")
        raise UsageError(f"{chosen} is not recorded in {where}.{suggest_metric(rows, chosen)}")
    return max(reversed(found), key=lambda item: score(item["value"], chosen_mode))  # of equal values, the later one


def _best_of(metric: str, mode: str, row: Row) -> dict[str, Any] | None:
    """Return the best checkpoint of a run, or its latest one if only the run has the value; None without a value."""
    facts = {"metric": metric, "mode": mode, "experiment": row.folder.experiment, "run": row.folder.name}
    kept = list_checkpoints(row.folder.checkpoints, report=True)
    if saved := best_first(kept, metric, mode):
        item = saved[0]
        path, step = join_path(row.folder.checkpoints, item.name), None if item.finished else item.global_step
        return facts | {"value": item.metrics[metric], "epoch": item.epoch + 1, "step": step, "checkpoint": path}
    value, latest = row.metrics.get(metric), (row.record.get("latest") or {}).get("path")
    if score(value, mode) == -math.inf or (latest and not kept):
        return None
    return facts | {"value": value, "epoch": row.epoch, "step": None, "checkpoint": latest}


def best_lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of `best` for the terminal."""
    epoch = f" ({position({**found, 'epoch': found['epoch'] - 1})})" if found["epoch"] is not None else ""
    kept = f"{found['checkpoint']}{epoch}" if found["checkpoint"] else f"none of epoch {found['epoch']} is kept; {MORE}"
    rows = {found["metric"]: f"{format_number(found['value'])} ({found['mode']})"}
    return aligned(rows | {"run": f"{found['experiment']}/{found['run']}", "checkpoint": kept})
