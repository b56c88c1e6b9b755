"""Charts of runs, drawn by Plotly. It interprets tags and `%{...}` in texts, so all of them are escaped."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas
from plotly import graph_objects
from plotly.colors import qualitative

from mlx_runtime.companions.ui.elements import plain
from mlx_runtime.companions.views.report import escape
from mlx_runtime.runs.tables import format_number

COLORS = qualitative.D3


def name(value: object) -> str:
    """Return a text for a legend or a title."""
    return escape(format_number(value) if isinstance(value, float) else plain(str(value)))


def curves(
    table: pandas.DataFrame, *, x: str = "step", log: Sequence[str] = (), labels: Mapping[str, str] | None = None
) -> list[graph_objects.Figure]:
    """Draw a table of metrics: a figure per metric, with a line per run or group, and a band of one standard deviation.

    Args:
        x: `step`, `epoch` or `time`.
        log: axes that are logarithmic, `x` or `y`.
        labels: legends of runs by `place`; by default, their names.
    """
    groups = ["place", "run"] if "place" in table else [*table.columns[: [*table.columns].index("key")]]
    colors: dict[Any, str] = {}
    figures = []
    for key, rows in table.groupby("key", sort=False):
        figure = graph_objects.Figure()
        lines: Iterable[tuple[Any, pandas.DataFrame]] = (
            rows.groupby(groups, sort=False, dropna=False) if groups else [((), rows)]
        )
        for values, line in lines:
            legend = name((labels or {}).get(values[0], values[-1])) if "place" in table else _group(groups, values)
            color = colors.setdefault(legend if "place" not in table else values[0], COLORS[len(colors) % len(COLORS)])
            mode = "lines" if len(line) > 1 else "markers"
            own = {"name": legend, "legendgroup": legend, "x": line[x], "line": {"color": color}, "mode": mode}
            figure.add_scatter(y=line["value"], **own)
            if "std" in line and line["std"].notna().any():
                for sign, fill in ((-1, None), (1, "tonexty")):
                    edge = own | {"line": {"width": 0, "color": color}, "showlegend": False, "hoverinfo": "skip"}
                    figure.add_scatter(y=line["value"] + sign * line["std"], fill=fill, opacity=0.3, **edge)
        figure.update_layout(
            title=name(key),
            uirevision=f"{key} {x} {log}",  # a zoom outlives a refresh
            xaxis={"title": f"{x} (s)" if x == "time" else x, "type": "log" if "x" in log else "linear"},
            yaxis={"type": "log" if "y" in log else "linear"},
            height=360,
            margin={"l": 50, "r": 10, "t": 40, "b": 40},
            showlegend=True,
        )
        figures.append(figure)
    return figures


def _group(names: Sequence[str], values: Sequence[object]) -> str:
    known = ["none" if value is None or value != value else value for value in values]
    pairs = zip(names, known, strict=True)
    return ", ".join(f"{name(key.removeprefix('config.'))} = {name(value)}" for key, value in pairs) or "all runs"
