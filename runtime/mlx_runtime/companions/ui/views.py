"""What the page shows of runs: the list, differences, one run, and a sweep, as elements of marimo."""

import difflib
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import marimo
from plotly import graph_objects

from mlx_runtime import companions
from mlx_runtime.companions.ui import charts, elements
from mlx_runtime.companions.ui.events import read_written
from mlx_runtime.companions.ui.tables import folder_of, metric_names, metrics_table
from mlx_runtime.companions.views.difference import difference
from mlx_runtime.companions.views.report import OF_TRAINING, checkpoint_table, known_facts
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.logs import log_name
from mlx_runtime.runs.queries.listing import summarize
from mlx_runtime.runs.tables import format_duration
from mlx_runtime.storage.files import storage_at

if TYPE_CHECKING:
    import pandas

LOG_BYTES = 64 << 10
"""The end of a log that is shown."""

COMPARED = 8
"""Maximum number of runs side by side."""

DIFF_LINES = 2_000

MAIN = 6
"""Number of charts if no metrics are chosen."""


def overview(
    runs: "pandas.DataFrame", columns: Sequence[str], search: str, sort: str, ascending: bool
) -> "pandas.DataFrame":
    """Return the columns that a list of runs shows, of the runs that contain all words of a search.

    `#` is the position of a row, and `place` the folder of its run.
    """
    import pandas

    last = pandas.Series(index=runs.index, dtype=float)
    for metric in runs["monitor"].dropna().unique():
        last = runs[f"metrics.{metric}"].where(runs["monitor"] == metric, last) if f"metrics.{metric}" in runs else last
    shown = pandas.DataFrame(
        {
            "run": runs["experiment"] + "/" + runs["run"],
            "status": runs["status"],
            "epoch": runs["epoch"],
            "metric": runs["monitor"],
            "best": runs["best"],
            "last": last,
            "tags": runs["tags"].map(", ".join),
            "note": runs["note"],
            "start": runs["start"].map(lambda time: time[:19].replace("T", " ") if isinstance(time, str) else None),
            "duration": runs["duration_s"].map(format_duration),
            "place": runs["place"],
        }
        | {name: runs[name] for name in columns if name in runs},
    )
    if words := search.lower().split():
        lines = (" ".join(map(str, row)).lower() for row in shown.itertuples(index=False))
        shown = shown[[all(word in line for word in words) for line in lines]]
    by = runs["duration_s"] if sort == "duration" else shown[sort] if sort in shown else runs["start"]
    order = by.loc[shown.index].sort_values(ascending=ascending, kind="stable", key=_sortable).index
    ordered: pandas.DataFrame = shown.loc[order].reset_index(drop=True)
    ordered["#"] = range(len(ordered))
    return ordered


def _sortable(values: "pandas.Series") -> "pandas.Series":
    """Return values as numbers if all of them are, otherwise as text."""
    import pandas

    numbers: pandas.Series = pandas.to_numeric(values, errors="coerce")
    return numbers if numbers.notna().sum() == values.notna().sum() else values.astype(str)


def labels(runs: "pandas.DataFrame") -> dict[str, str]:
    """Return the names of runs by place; where two storages have runs of one name, the places themselves."""
    names = runs["experiment"] + "/" + runs["run"]
    twice = names.duplicated(keep=False)
    return dict(zip(runs["place"], names.where(~twice, runs["place"]), strict=True))


def main_metrics(runs: "pandas.DataFrame") -> list[str] | None:
    """Return the metrics that are shown without a choice: the monitored ones, or else the first results."""
    if monitored := [*runs["monitor"].dropna().unique()]:
        return monitored
    known = [name.removeprefix("metrics.") for name in runs if name.startswith("metrics.") and runs[name].notna().any()]
    return [name for name in known if not OF_TRAINING.match(name)][:MAIN] or None


def differences(runs: "pandas.DataFrame") -> list[Any]:
    """Show what differs between runs: facts, config, metrics and, for the first two, their code."""
    import pandas

    if len(runs) < 2:
        return [marimo.plain_text("Choose two or more runs in the list.")]
    names = dict([*labels(runs).items()][:COMPARED])
    (first, title), *others = names.items()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    problems = []
    for place, name in others:
        try:
            found = difference(folder_of(first), folder_of(place))
        except (MlxError, OSError) as error:
            problems.append(short_message(error))
            continue
        for part, values in found.items():
            for key, sides in values.items():
                row = rows.setdefault((part, key), {"": f"{part}: {key}", title: sides.get("a")})
                row[name] = sides.get("b")
    cells = [{"": row[""]} | {name: str(row.get(name, row[title])) for name in names.values()} for row in rows.values()]
    shown = [elements.problems(problems), elements.table(pandas.DataFrame(cells), page_size=50)] if cells else []
    return shown + _attempt(lambda: [elements.text(_code_difference(folder_of(first), folder_of(others[0][0])))])


def _code_difference(first: RunFolder, second: RunFolder) -> str:
    """Return the difference between the code that two runs have stored. It is compared, never run."""
    roots = [snapshots.unpack(folder) for folder in (first, second)]
    lines: list[str] = []
    for file in sorted({file.relative_to(root) for root in roots for file in root.rglob("*") if file.is_file()}):
        paths = [root / file for root in roots]
        a, b = (path.read_text(errors="replace").splitlines() if path.is_file() else [] for path in paths)
        lines += difflib.unified_diff(a, b, f"{first.title}/{file}", f"{second.title}/{file}", lineterm="")
    return "\n".join(lines[:DIFF_LINES])


def run(place: str) -> list[Any]:
    """Show one run: how it went, its resources and checkpoints, the end of its log, and its images and texts."""
    import pandas

    folder = folder_of(place)
    [row] = summarize([folder])
    if row.problem:
        return [elements.problems([row.problem])]
    shown = [elements.facts({"status": row.status} | known_facts(row))]
    reasons = [row.record.get(name) for name in ("error", "stop_reason", "waits_for")]
    shown += [elements.text(reason) for reason in reasons if reason]
    measured = [name for name in metric_names(place) if OF_TRAINING.match(name)][: 2 * MAIN]
    table = metrics_table([place], measured)
    shown += [elements.problems(table.attrs["problems"].values())]
    charted = [marimo.ui.plotly(figure) for figure in charts.curves(table)]
    shown += [marimo.hstack(charted[at : at + 3], widths="equal") for at in range(0, len(charted), 3)]
    if checkpoints := checkpoint_table(row):
        shown += [elements.table(pandas.DataFrame(checkpoints).rename(columns={"": "is"}))]
    return shown + _attempt(lambda: [elements.text(_log(folder))]) + _attempt(lambda: _written(folder))


def _log(folder: RunFolder) -> str:
    try:
        with storage_at(folder.location).open(log_name()) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES))
            content: bytes = stream.read()
    except FileNotFoundError:
        return "There is no log yet."
    return re.sub(r"[^\n]*\r(?!\n)", "", content.decode(errors="replace"))  # progress bars


def _written(folder: RunFolder) -> list[Any]:
    """Show the images and texts that a run wrote to TensorBoard."""
    return [
        elements.picture(item.content, f"{item.tag}, step {item.step}")
        if isinstance(item.content, bytes)
        else elements.text(f"{item.tag}, step {item.step}:\n{item.content}")
        for item in read_written(folder)
    ]


def sweeps(runs: "pandas.DataFrame") -> dict[str, str]:
    """Return the places of the sweeps of runs, by name."""
    if "sweep.name" not in runs:
        return {}
    found = runs[runs["sweep.name"].notna()]
    above = found["place"].str.rpartition("/")[0]
    first = found[~(above + "/" + found["sweep.name"]).duplicated()]
    folders = [folder_of(place) for place in first["place"]]
    names = first["sweep.name"]
    places = [run_folder(item.root, item.experiment, name) for item, name in zip(folders, names, strict=True)]
    titles = [item.title for item in places]
    return {item.title if titles.count(item.title) == 1 else item.location: item.location for item in places}


def sweep(place: str) -> list[Any]:
    """Show a sweep: its best trial, parallel coordinates, importance, learning curves with pruned trials, a table."""
    return _attempt(lambda: _sweep(folder_of(place)))


def _sweep(folder: RunFolder) -> list[Any]:
    result = companions.part("sweeps.results").SweepResult(folder)
    scored = [trial for trial in result.ranked() if trial.score is not None and trial.status != "FAILED"]
    shown: list[Any] = [elements.text("\n".join(result.lines()))] if scored else []
    table = elements.table(result.table().reset_index())
    return [*shown, *(_attempt(lambda: _charts(result, scored)) if scored else []), table]


def _charts(result: Any, trials: Sequence[Any]) -> list[Any]:
    shown: list[Any] = []
    for title, items in companions.part("sweeps.report").draw(trials, result.metric, result.mode).items():
        figures = [marimo.ui.plotly(graph_objects.Figure(item["figure"])) for item in items]
        shown += [marimo.md(f"**{title}**"), marimo.hstack(figures, widths="equal", wrap=True)]
    return shown


def _attempt(show: Callable[[], list[Any]]) -> list[Any]:
    """Return what a function returns, or a box with the reason why it cannot be shown."""
    try:
        return show()
    except (MlxError, OSError) as error:
        return [elements.problems([short_message(error)])]
