"""The best checkpoint of an experiment or of a run, by a metric."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.checkpoints.index import best_first, list_checkpoints, position, score
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.listing import Row, list_rows, map_concurrently, mode_of, suggest_metric, summarize
from mlx_runtime.runs.queries.lookup import no_checkpoint
from mlx_runtime.runs.tables import format_number, plural
from mlx_runtime.storage.files import join_path


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
        more = f"; {name} has {plural(len(listed) - 1, 'other unreadable record')}" if len(listed) > 1 else ""
        raise StorageError(f"{listed[-1].problem}{more}")
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

    def best_of(row: Row) -> dict[str, Any] | None:
        value: float | None
        epoch: int | None
        path: str | None
        facts = {"metric": chosen, "mode": chosen_mode, "experiment": row.folder.experiment, "run": row.folder.name}
        kept, latest = list_checkpoints(row.folder.checkpoints, report=True), row.record.get("latest") or {}
        if saved := best_first(kept, chosen, chosen_mode):
            item, value, epoch = saved[0], saved[0].metrics[chosen], saved[0].epoch + 1
            path, step = join_path(row.folder.checkpoints, item.name), None if item.finished else item.global_step
        else:
            value, epoch = row.metrics.get(chosen), row.epoch
            path, step = latest.get("path"), None
        if score(value, chosen_mode) == -math.inf or (path and not kept):
            return None
        return facts | {"value": value, "epoch": epoch, "step": step, "checkpoint": path}

    folds = [row for row in rows if row.record.get("fold") and run is None]
    found = [item for item in map_concurrently(best_of, [row for row in rows if row not in folds]) if item is not None]
    sweep = folds[-1].sweep.get("name") if folds else None
    if not found and folds:
        cure = f"the mean of each trial: mlx xp best {name} {sweep}" if sweep else "compare the means of their values"
        raise UsageError(f"all runs of {name} with {chosen} are folds of a cross-validation; {cure}")
    if not found:
        if lost := [row.folder for row in rows if row.value(chosen) is not None]:
            raise no_checkpoint(lost[-1])
        if any(chosen in row.metrics for row in rows):
            raise UsageError(f"no value of {chosen} in {where} is finite")
        raise UsageError(f"{chosen} is not recorded in {where}.{suggest_metric(rows, chosen)}")
    if folds:
        see = f"; see: mlx xp best {name} {sweep}" if sweep else ""
        warn(f"folds of a cross-validation are not compared{see}")
    return max(reversed(found), key=lambda item: score(item["value"], chosen_mode))  # of equal values, the later one


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
