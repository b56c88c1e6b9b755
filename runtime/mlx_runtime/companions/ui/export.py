"""Runs as pages that work offline: a list with overlaid curves, and the report of each run."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.tables import folder_of, metrics_table, runs_table
from mlx_runtime.companions.views import report
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.queries.listing import summarize

PAGE = Path(__file__).parent / "pages" / "runs.html"

MARK = "<!-- mlx xp ui --export -->"
"""In the first page, so that a later export may replace it, with the others."""

MOST_RUNS = 100
"""Maximum number of exported runs; each page contains Plotly, 5 MB."""


def write(roots: Sequence[str], chosen: Sequence[str], folder: Path) -> str:
    """Write the pages of runs to a folder. Return the path of the first one.

    Args:
        roots: the storages.
        chosen: names like `digits/run_003`, with `*` for any text, or places; all runs without any.
    """
    runs = runs_table(roots)
    titles = runs["experiment"] + "/" + runs["run"]
    if chosen:
        wanted = [
            any(fnmatchcase(title, pattern) or place == pattern.rstrip("/") for pattern in chosen)
            for title, place in zip(titles, runs["place"], strict=True)
        ]
        runs, titles = runs[wanted], titles[wanted]
    if not len(runs):
        like = f" like {' or '.join(chosen)}" if chosen else ""
        raise UsageError(f"there are no runs{like} in {', '.join(roots)}; list them with: mlx xp ls")
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs):,} runs would be exported; choose at most {MOST_RUNS}, like --run 'digits/*'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / "index.html"
        if any(folder.iterdir()) and not (index.is_file() and MARK in index.read_text(errors="replace")):
            raise UsageError(f"{folder} is not empty, and has no earlier export; choose another folder")
        for earlier in folder.glob("run_[0-9][0-9][0-9].html"):
            earlier.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; choose another folder") from error
    rows = summarize([folder_of(place) for place in runs["place"]])
    pages = [f"run_{number:03d}.html" for number in range(1, len(rows) + 1)]
    for row, name in zip(rows, pages, strict=True):
        report.write(report.render_run(row.folder), folder / name)
    table = metrics_table(runs)
    page = report.render(
        PAGE,
        title=", ".join(roots),
        table=[row.cells() for row in rows],
        pages=pages,
        problems=[*(row.problem for row in rows if row.problem), *table.attrs["problems"].values()],
        charts=[_chart(str(key), lines) for key, lines in table.groupby("key", sort=False)],
    )
    report.write(page, index)
    return str(index)


def _chart(key: str, lines: Any) -> dict[str, Any]:
    """Return the chart of a metric, with a curve per run."""
    curves = [
        {
            "name": report.escape(line["run"].iloc[0]),
            "x": [*line["step"]],
            "y": [None if value != value else value for value in line["value"]],
            "epochs": [*line["epoch"]],
        }
        for _, line in lines.groupby("place", sort=False)
    ]
    return {"title": key, "curves": curves}
