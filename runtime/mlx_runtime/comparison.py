"""Compare runs: which is the best of an experiment, and how two differ."""

import math
from collections.abc import Mapping
from typing import Any

from mlx_runtime.errors import StorageError, UsageError, first_line
from mlx_runtime.layout import RunFolder
from mlx_runtime.listing import Row, at_once, known, mode_of, number, of, rows, span
from mlx_runtime.redaction import redacted_tree
from mlx_runtime.saved import saved_in
from mlx_runtime.storage import joined


def best(name: str, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """The run and the checkpoint of an experiment in which a metric is best.

    Args:
        name: of an experiment in the storage.
        metric: by default what its latest run monitors.
        mode: `max` or `min`; by default what its runs say of the metric that they monitor.

    Returns:
        `metric`, `mode`, `value`, `experiment`, `run`, `epoch`, `checkpoint`. A number that no checkpoint was saved
        with, like that of a test at the end, comes with the run's latest checkpoint.

    Raises:
        UsageError: no such experiment or metric, or nobody says whether a max or a min is best.
        StorageError: the storage does not answer.
    """
    found = [row for row in rows(name) if row.problem is None]
    chosen = metric or next((row.monitor for row in reversed(found) if row.monitor), None)
    if chosen is None:
        raise UsageError(f"the runs of {name} have no cfg.monitor; give --metric. {known(found, '')}".rstrip())
    way = mode or mode_of(found, chosen)
    if way is None:
        raise UsageError(f"is the max or the min of {chosen} the best? No run has it as cfg.monitor; give --mode")

    def candidates(row: Row) -> list[dict[str, Any]]:
        saved = saved_in(row.folder.checkpoints)
        kept = [(item.metrics[chosen], item) for item in saved if item.finished and chosen in item.metrics]
        options: list[tuple[float | None, int | None, str | None]]
        options = [(value, item.epoch + 1, joined(row.folder.checkpoints, item.name)) for value, item in kept]
        if not options:
            options = [(row.metrics.get(chosen), row.epoch, (row.record.get("latest") or {}).get("path"))]
        where = {"metric": chosen, "mode": way, "experiment": row.folder.experiment, "run": row.folder.name}
        return [
            where | {"value": value, "epoch": epoch, "checkpoint": checkpoint}
            for value, epoch, checkpoint in options
            if value is not None and not math.isnan(value)
        ]

    options = [item for items in at_once(candidates, found) for item in items]
    if not options:
        raise UsageError(f"no run of {name} has a value of {chosen}.{known(found, chosen)}")
    sign = 1 if way == "max" else -1
    return max(reversed(options), key=lambda item: sign * item["value"])  # of equals the later


def difference(first: RunFolder, second: RunFolder) -> dict[str, dict[str, dict[str, Any]]]:
    """What differs between two runs.

    Returns:
        `run` (status, seed, commit, versions, …), `config` and `metrics`, each a dict of names with the
        values `a` and `b`, or only one of them.

    Raises:
        StorageError: one of them cannot be read.
    """
    a, b = (_described(folder) for folder in (first, second))
    differing = {}
    for part in a:
        names = [*a[part], *(name for name in b[part] if name not in a[part])]
        differing[part] = {
            name: {side: values[part][name] for side, values in (("a", a), ("b", b)) if name in values[part]}
            for name in names
            if name not in a[part] or name not in b[part] or a[part][name] != b[part][name]
        }
    return differing


def _described(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Facts, config and numbers of a run, each as one flat dict."""
    from mlx_runtime.loading import parsed

    [row] = of([folder])
    if row.problem:
        raise StorageError(row.problem)
    try:
        config = redacted_tree(parsed(folder.read(folder.conf.name), environment=False))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {folder.place}/{folder.conf.name}: {first_line(error)}") from error
    record = row.record
    git = record.get("git") or {}
    facts = {
        "status": row.status,
        "epoch": row.epoch,
        f"best {row.monitor}": row.best,
        "duration": span(row.duration_s),
    }
    facts |= {name: record.get(name) for name in ("seed", "workers", "device", "host", "python")}
    facts |= {"commit": git.get("commit"), "uncommitted changes": bool(git.get("diff"))}
    facts |= {f"{name} version": version for name, version in (record.get("packages") or {}).items()}
    return {"run": facts, "config": flat(config), "metrics": dict(row.metrics)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"cfg": {"seed": 0}}` → `{"cfg.seed": 0}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def table(
    first: RunFolder, second: RunFolder, differing: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """The differences as rows of a table."""
    a, b = (folder.title for folder in (first, second)) if first.title != second.title else (first.place, second.place)
    return [
        {"": name, a: _cell(part, sides, "a"), b: _cell(part, sides, "b")}
        for part, names in differing.items()
        for name, sides in names.items()
    ]


def lines(found: Mapping[str, Any]) -> list[str]:
    """What `best` found, for people."""
    title = f"{found['experiment']}/{found['run']}"
    epoch = f" (epoch {found['epoch']})" if found["epoch"] is not None else ""
    rows = {
        found["metric"]: f"{number(found['value'])} ({found['mode']})",
        "run": title,
        "checkpoint": f"{found['checkpoint']}{epoch}" if found["checkpoint"] else "none is kept",
    }
    width = max(len(name) for name in rows) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]


def _cell(part: str, sides: Mapping[str, Any], side: str) -> str:
    if side not in sides:
        return "-"
    value = sides[side]
    return number(value) if isinstance(value, float) and part != "config" else str(value)
