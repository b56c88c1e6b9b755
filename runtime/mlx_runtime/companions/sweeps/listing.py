"""The runs of sweeps in `mlx xp ls`."""

from collections.abc import Sequence

from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.listing import Row, summarize
from mlx_runtime.runs.tables import format_number, plural


def table(rows: Sequence[Row], metric: str | None = None) -> list[dict[str, str]]:
    """Return the runs of one sweep as rows of a table, with their trials, seeds, folds and values."""
    names = dict.fromkeys(name for row in rows for name in row.sweep.get("values", {}))
    shown = [name for name in ("seed", "fold") if any(row.sweep.get(name) is not None for row in rows)]
    lines = []
    for row in rows:
        cells, sweep = row.cells(metric), row.sweep
        line = {"experiment": cells.pop("experiment"), "run": cells.pop("run"), "trial": str(sweep["trial"])}
        line |= {name: "-" if sweep.get(name) is None else str(sweep[name] + (name == "fold")) for name in shown}
        line |= {name: sweep.get("values", {}).get(name, "-") for name in names}
        lines.append(line | {name: cells[name] for name in cells if name not in ("workers", "age")})
    return lines


def grouped(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return all runs as rows of a table, with a line per sweep above its runs."""
    sweeps: dict[RunFolder, list[Row]] = {}
    for row in rows:
        if row.sweep_folder is not None:
            sweeps.setdefault(row.sweep_folder, []).append(row)
    own = {row.folder: row for row in summarize(list(sweeps))}
    lines = []
    for row in rows:
        if row.sweep_folder is None:
            lines.append(row.cells())
        elif runs := sweeps.pop(row.sweep_folder, None):
            lines.append(_sweep_cells(own[row.sweep_folder], runs))
            lines += [cells | {"run": f"  {cells['run']}"} for cells in (run.cells() for run in runs)]
    return lines


def _sweep_cells(sweep: Row, runs: Sequence[Row]) -> dict[str, str]:
    """Return the line of a sweep: the number of trials, and the value of the best one, of several runs their mean."""
    trials = {run.sweep["trial"] for run in runs}
    cells = sweep.cells() | {"epoch": plural(len(trials), "trial")}
    if spread := format_number((sweep.record.get("best") or {}).get("std")):
        cells["best"] += f" ± {spread}"
    return cells if sweep.problem is None else cells | {"status": "-"}
