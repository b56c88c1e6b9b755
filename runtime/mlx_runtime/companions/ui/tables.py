"""Tables of runs and of their metrics, for the page and for notebooks."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy

from mlx_runtime.companions.views.report import MAX_POINTS, read_curves, thin
from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.extras import require
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import AskJobs, Row, list_rows, map_concurrently
from mlx_runtime.storage.files import is_uri, split_options, storage_root

require("pandas", "a table of runs")
import pandas  # noqa: E402 - checked above

SPREAD = ("metrics", "config", "sweep", "job")
"""Fields of a listing that become several columns, like `metrics.val/loss` and `config.cfg.seed`."""

POINT = ("key", "step", "epoch", "time", "value")
"""Columns of every table of metrics."""

MOST_VALUES = 200
"""Maximum number of columns of a run for each of these fields."""

UNGROUPED = ("place", "tags", "attempts")
"""Columns of runs by which no groups are made: they are lists, or differ for all runs."""

UNUSED = ("git", "packages", "datasets", "hub", "prepared")
"""Large fields of records that no table needs."""


class FileCache:
    """What was read from files on this machine, until they change. Threads share it; the oldest entries are dropped."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self.entries: collections.OrderedDict[Path, tuple[Any, Any]] = collections.OrderedDict()

    def get(self, folder: RunFolder, name: str, read: Callable[[], Any]) -> Any:
        """Return what `read` returns for a file of a run, perhaps from an earlier call."""
        path, facts = folder.path / name, None
        with contextlib.suppress(OSError):
            facts = path.stat()
        if folder.uri is not None or facts is None:
            return read()
        stamp = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
        with self._lock:
            known, value = self.entries.get(path, (None, None))
        if known != stamp:
            value = read()
            with self._lock:
                self.entries[path] = (stamp, value)
                if len(self.entries) > self._size:
                    self.entries.popitem(last=False)
        return value

    def update(self, entries: Mapping[Path, tuple[Any, Any]]) -> None:
        """Add the `entries` of the cache of another process."""
        with self._lock:
            self.entries.update(entries)


RECORDS, METRICS = FileCache(50_000), FileCache(50)


def runs_table(
    storage: str | Path | Iterable[str | Path] | None = None,
    *,
    experiment: str | None = None,
    ask: AskJobs | None = None,
) -> pandas.DataFrame:
    """Return one row per run, oldest first, with the fields of `mlx xp ls --json`.

    Columns: `experiment`, `run`, `status`, `epoch` and `epochs` (counted from 1), `monitor`, `mode`, `best`,
    `best_epoch`, `tags`, `note`, `start`, `end`, `duration_s`, `error`, `place` (path or URI of the run's folder), …
    The mappings among the fields become columns with a prefix: `metrics.val/loss` has the latest value of a metric,
    `config.optimizers.adam.lr` a value of conf.yaml, `sweep.trial` and `job.id` what the run belongs to, at most 200
    for each run and prefix. A run without `config` began with an earlier version. A run whose record cannot be read has
    the status `UNREADABLE`, and the reason in `problem`.

    Args:
        storage: a storage, or several; by default that of the experiment in the working directory, or `MLX_STORAGE`.
        experiment: only runs of this experiment.
        ask: asks clusters for the status of jobs; by default, the records alone are read.

    Raises:
        UsageError: there is no such storage or experiment.
        StorageError: the storage does not answer.
    """
    rows = [row for root in roots(storage) for row in list_rows(experiment, root=root, ask=ask, load=_load)]
    no_run = Row(RunFolder(Path("experiment/run_000")), "", {})
    cells = pandas.DataFrame(map_concurrently(_cells, rows), columns=None if rows else [*_cells(no_run)], dtype=object)
    # An integer of conf.yaml stays one, also if other runs lack it.
    return cells.assign(**{name: [*cells[name]] for name in cells if rows and not name.startswith("config.")})


def roots(storage: str | Path | Iterable[str | Path] | None) -> list[str]:
    """Return the roots of storages, each once; raise UsageError for a folder that does not exist."""
    if storage is None:
        return [lookup.storage_root()]
    given = [storage] if isinstance(storage, str | Path) else storage
    found = {storage_root(str(item)): None for item in given}
    if missing := [root for root in found if not is_uri(root) and not Path(root).is_dir()]:
        raise UsageError(f"there is no storage {missing[0]}; name its folder, or its URI")
    return [*found]


def folder_of(place: str) -> RunFolder:
    """Return the run whose folder has a path or URI, as in the column `place`."""
    base, options = split_options(place)
    above, experiment, run = base.rstrip("/").rsplit("/", 2)
    return run_folder(above + options, experiment, run)


def metrics_table(
    runs: pandas.DataFrame | Iterable[str | Path],
    keys: Iterable[str] | None = None,
    *,
    x: Literal["step", "epoch", "time"] = "step",
    by: Sequence[str] | None = None,
    smooth: float = 0.0,
    points: int = MAX_POINTS,
) -> pandas.DataFrame:
    """Return the curves of metrics, one row per point.

    Columns: `place` and `run` (like `digits/run_003`), `key` (name of the metric), `step`, `epoch` (counted from 1),
    `time` (seconds since the first report of the run) and `value` (NaN where the run recorded none). With `by`, these
    columns come in place of `place` and `run`, `value` is the mean over the runs that have equal values in them, and
    there are two more: `std`, the standard deviation, and `runs`, the number of runs at this step.

    A curve has at most so many `points`: the minimum and the maximum of each section are kept, and gaps. Means and
    smoothing come before. `table.attrs["problems"]` has a line for each run that cannot be read, or only in part, by
    its place; all others are in the table.

    Args:
        runs: rows of `runs_table`, or names, paths or URIs of runs.
        keys: names of metrics; by default all.
        x: where runs are compared for means. Per `epoch`, the last value of each run counts.
        by: columns of `runs`, like `["config.optimizers.adam.lr"]`; `[]` is one mean over all runs.
        smooth: weight of the past in an exponential moving average, from 0 (none) to 1.
        points: maximum number of points per curve.

    Raises:
        UsageError: there is no such run, or no such column.
    """
    if not isinstance(runs, pandas.DataFrame):
        runs = pandas.DataFrame({"place": [lookup.resolve_run(str(run)).location for run in runs]}, dtype=object)
    runs = runs.drop_duplicates("place")
    for name in by or ():
        if name not in runs or name in (*POINT, *UNGROUPED):
            raise UsageError(f"cannot group by {name!r}: choose another column of the table of runs")
    names, wanted = ["place", "run"] if by is None else [*by], None if keys is None else [*keys]
    problems: dict[str, str] = {}
    parts = [part for place in runs["place"] for part in _curves(folder_of(place), wanted, x, problems)]
    table = pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame(columns=["place", "run", *POINT])
    if by is not None:
        groups = runs[["place", *by]].map(lambda value: ", ".join(value) if isinstance(value, list) else value)
        table = _means(table.drop(columns="run").merge(groups, on="place"), names, x)
    curves = table.groupby([*names, "key"], dropna=False, sort=False)
    drawn = [_drawn(curve, smooth, points) for _, curve in curves]
    table = pandas.concat(drawn, ignore_index=True) if drawn else table
    table.attrs["problems"] = problems
    ordered: pandas.DataFrame = table[[*names, *POINT, *(() if by is None else ("std", "runs"))]]
    return ordered


def _curves(
    folder: RunFolder, keys: Sequence[str] | None, x: str, problems: dict[str, str]
) -> Iterator[pandas.DataFrame]:
    """Yield the curves of a run."""
    try:
        curves, damaged = METRICS.get(folder, folder.metrics.name, lambda: _read_curves(folder))
    except FileNotFoundError:  # it has not recorded any yet
        return
    except (OSError, StorageError) as error:
        problems[folder.location] = f"{folder.title}: metrics.jsonl cannot be read: {short_message(error)}"
        return
    if damaged:
        problems[folder.location] = f"{folder.title}: {damaged[0]}"
    for key in curves if keys is None else [key for key in keys if key in curves]:
        part = pandas.DataFrame(curves[key], columns=["step", "value", "epoch", "time"])
        part = part.astype({"step": int, "epoch": int}).assign(place=folder.location, run=folder.title, key=key)
        yield part.drop_duplicates("epoch", keep="last") if x == "epoch" else part


def _read_curves(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """Return the curves of a run as arrays, which are small, and what is wrong with the file."""
    damaged: list[str] = []
    found = read_curves(folder.read(folder.metrics.name).decode(errors="replace"), damaged)
    curves = {key: numpy.array(points, dtype=float) for key, points in found.items()}
    start = min((curve[0, 3] for curve in curves.values() if not numpy.isnan(curve[0, 3])), default=0.0)
    for curve in curves.values():
        curve[:, 3] -= start
    return curves, damaged


def _means(table: pandas.DataFrame, names: Sequence[str], x: str) -> pandas.DataFrame:
    """Return the means and the standard deviations of runs at equal steps or epochs."""
    at, other = ("epoch", "step") if x == "epoch" else ("step", "epoch")
    rows = table.groupby([*names, "key", at], dropna=False)
    means = {"value": ("value", "mean"), "std": ("value", "std"), "runs": ("value", "count"), "time": ("time", "mean")}
    return rows.agg(**means, **{other: (other, "max")}).reset_index()


def _drawn(curve: pandas.DataFrame, smooth: float, points: int) -> pandas.DataFrame:
    """Return a curve smoothed and reduced."""
    if smooth > 0:
        means = curve["value"].ewm(alpha=1 - min(smooth, 0.999)).mean()
        curve = curve.assign(value=means.where(curve["value"].notna()))
    values = curve["value"]
    kept = thin([*zip(range(len(curve)), values.where(values.notna(), None).astype(object), strict=True)], points)
    reduced: pandas.DataFrame = curve.iloc[[index for index, _ in kept]]
    return reduced


def _load(folder: RunFolder) -> Mapping[str, Any]:
    """Return the record of a run without what no table needs, so that many can be kept."""

    def read() -> dict[str, Any]:
        record = records.load_record(folder)
        return {name: value for name, value in record.items() if name not in UNUSED}

    record: Mapping[str, Any] = RECORDS.get(folder, folder.record.name, read)
    return record


def _cells(row: Row) -> dict[str, Any]:
    """Return the cells of a run by column."""
    fields = row.fields()
    spread = {name: fields.pop(name) or {} for name in SPREAD}
    for name, values in spread.items():
        fields |= {f"{name}.{key}": value for key, value in [*values.items()][:MOST_VALUES]}
    return fields
