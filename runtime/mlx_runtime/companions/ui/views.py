"""What the page shows of runs: the list, differences, one run, and a sweep, as elements of marimo."""

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import marimo
import pandas
from plotly import graph_objects

from mlx_runtime import companions
from mlx_runtime.companions.ui import charts, elements
from mlx_runtime.companions.ui.events import read_written
from mlx_runtime.companions.ui.storages import check
from mlx_runtime.companions.ui.tables import folder_of, metrics_table
from mlx_runtime.companions.views.report import OF_TRAINING, checkpoint_table, known_facts
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.logs import log_name
from mlx_runtime.runs.queries.listing import summarize
from mlx_runtime.runs.records import LIVING
from mlx_runtime.storage.files import storage_at

LOG_BYTES = 64 << 10
"""The end of a log that is shown."""

COMPARED = 8
"""Maximum number of runs side by side, the first ones of those that are chosen."""

DIFF_LINES = 2_000

MAIN = 6
"""Number of charts if no metrics are chosen."""


def overview(runs: pandas.DataFrame, columns: Sequence[str]) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Return the list of runs, and another one of those that train now, both newest first.

    The numbers of runs that train are in the second one alone, so that the first one stays as it is for a while.
    `#` is the position of a row, and `place` the folder of its run.
    """
    last = pandas.Series(index=runs.index, dtype=float)
    for metric in runs["monitor"].dropna().unique():
        last = runs[f"metrics.{metric}"].where(runs["monitor"] == metric, last) if f"metrics.{metric}" in runs else last
    listed = pandas.DataFrame(
        {
            "run": runs["experiment"] + "/" + runs["run"],
            "status": runs["status"],
            "epoch": runs["epoch"],
            "metric": runs["monitor"],
            "best": runs["best"],
            "last": last,
            "tags": runs["tags"].map(", ".join),
            "note": runs["note"].fillna(""),
            "start": runs["start"].map(lambda time: time[:19].replace("T", " ") if isinstance(time, str) else None),
            "minutes": (runs["duration_s"] / 60).round(1),
            "place": runs["place"],
            "#": range(len(runs)),
        }
        | {name: runs[name] for name in columns if name in runs},
    )
    living = listed["status"].isin(LIVING)
    moving = [name for name in listed if name in ("epoch", "best", "last", "minutes") or name.startswith("metrics.")]
    live = listed[living].drop(columns=["place", "#"])
    listed[moving] = listed[moving].mask(living)
    return listed, live


def labels(runs: pandas.DataFrame) -> dict[str, str]:
    """Return the names of runs by place; where two storages have runs of one name, the places themselves."""
    names = runs["experiment"] + "/" + runs["run"]
    return dict(zip(runs["place"], names.mask(names.duplicated(keep=False), runs["place"]), strict=True))


def main_metrics(runs: pandas.DataFrame) -> list[str]:
    """Return the metrics that are shown without a choice: the monitored ones, or else the first results."""
    known = [name.removeprefix("metrics.") for name in runs if name.startswith("metrics.") and runs[name].notna().any()]
    return [*runs["monitor"].dropna().unique()] or [name for name in known if not OF_TRAINING.match(name)][:MAIN]


def curves(runs: pandas.DataFrame, metrics: Sequence[str], *, log: Sequence[str], **options: Any) -> list[Any]:
    """Show the curves of metrics, by default of the main ones; `options` are those of `metrics_table`."""

    def show() -> list[Any]:
        table = metrics_table(runs, metrics or main_metrics(runs), **options)
        figures = charts.curves(table, x=options["x"], log=log, labels=labels(runs))
        return [elements.problems(table.attrs["problems"].values()), *map(marimo.ui.plotly, figures)]

    return _attempt(runs["place"], show)


def differences(runs: pandas.DataFrame) -> list[Any]:
    """Show what differs between runs: values of the table of runs and, for the first two, their code."""
    if len(runs) < 2:
        return [marimo.plain_text("Choose two or more runs in the list.")]
    compared = runs.head(COMPARED).set_axis([*labels(runs).values()][:COMPARED])
    values = compared.drop(columns=["run", "place"]).astype(object).T.fillna("-").map(str)
    differing = values[values.nunique(axis=1) > 1].reset_index(names="")
    first, second = (folder_of(place) for place in runs["place"].head(2))
    return [
        elements.table(differing, page_size=50),
        *_attempt(runs["place"].head(2), lambda: [elements.text(_code_difference(first, second))]),
    ]


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
    return _attempt([place], lambda: _run(folder_of(place)))


def _run(folder: RunFolder) -> list[Any]:
    [row] = summarize([folder])
    if row.problem:
        return [elements.problems([row.problem])]
    facts = {"status": row.status} | known_facts(row)
    shown = [elements.text("\n".join(f"{name}: {value}" for name, value in facts.items()))]
    reasons = [row.record.get(name) for name in ("error", "stop_reason", "waits_for")]
    shown += [elements.text(reason) for reason in reasons if reason]
    measured = [name for name in row.metrics if OF_TRAINING.match(name)][: 2 * MAIN]
    table = metrics_table([folder.location], measured)
    shown += [elements.problems(table.attrs["problems"].values())]
    charted = [marimo.ui.plotly(figure) for figure in charts.curves(table)]
    shown += [marimo.hstack(charted[at : at + 3], widths="equal") for at in range(0, len(charted), 3)]
    if checkpoints := checkpoint_table(row):
        shown += [elements.table(pandas.DataFrame(checkpoints).rename(columns={"": "is"}))]
    for show in (lambda: [elements.text(_log(folder))], lambda: _written(folder)):
        shown += _attempt([], show)
    return shown


def _log(folder: RunFolder) -> str:
    try:
        with storage_at(folder.location).open(log_name()) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES))
            content: bytes = stream.read()
    except FileNotFoundError:
        return "There is no log yet."
    lines = content.decode(errors="replace").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)  # without earlier states of progress bars


def _written(folder: RunFolder) -> list[Any]:
    return [
        elements.picture(content, f"{tag}, step {step}")
        if isinstance(content, bytes)
        else elements.text(f"{tag}, step {step}:\n{content}")
        for tag, step, content in read_written(folder)
    ]


def sweeps(runs: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Return the trials of each sweep of runs, by its place."""
    if "sweep.name" not in runs:
        return {}
    found = runs[runs["sweep.name"].notna()]
    places = [_sweep_folder(*trial).location for trial in zip(found["place"], found["sweep.name"], strict=True)]
    return {str(place): trials for place, trials in found.groupby(places, sort=False)}


def _sweep_folder(trial: str, sweep: str) -> RunFolder:
    folder = folder_of(trial)
    return run_folder(folder.root, folder.experiment, sweep)


def sweep(trials: pandas.DataFrame) -> list[Any]:
    """Show a sweep: its best trial, parallel coordinates, importance, learning curves with pruned trials, a table."""
    return _attempt(trials["place"], lambda: _sweep(_sweep_folder(*trials[["place", "sweep.name"]].iloc[0])))


def _sweep(folder: RunFolder) -> list[Any]:
    result = companions.part("sweeps.results").SweepResult(folder)
    scored = [trial for trial in result.ranked() if trial.score is not None and trial.status != "FAILED"]
    shown: list[Any] = [elements.text("\n".join(result.lines()))] if scored else []
    table = elements.table(result.table().reset_index())
    return [*shown, *(_attempt([], lambda: _charts(result, scored)) if scored else []), table]


def _charts(result: Any, trials: Sequence[Any]) -> list[Any]:
    shown: list[Any] = []
    for title, items in companions.part("sweeps.report").draw(trials, result.metric, result.mode).items():
        figures = [marimo.ui.plotly(graph_objects.Figure(item["figure"])) for item in items]
        shown += [marimo.md(f"**{title}**"), marimo.hstack(figures, widths="equal", wrap=True)]
    return shown


def _attempt(places: Iterable[str], show: Callable[[], list[Any]]) -> list[Any]:
    """Return what a function shows of runs, or a box with the reason why it cannot be shown."""
    try:
        check(places)
        return show()
    except (MlxError, OSError) as error:
        return [elements.problems([short_message(error)])]
