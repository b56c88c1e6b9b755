"""The display of a run in a notebook cell: progress, a table of epochs and a curve, redrawn while it trains."""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape

from mlx_runtime.events import (
    EpochEnded,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    StepProgress,
    WarningNotice,
    WorkerOutput,
    WorkersStarted,
)
from mlx_runtime.runs.tables import format_number
from mlx_runtime.tracking.console import EpochTable, TimeLeft

ROWS = 15
"""Number of latest epochs in the table; the curve shows all of them."""

REDRAW_S = 0.5
"""Minimum time between two drawings of the progress within an epoch."""

WARNING = "warning: "

WIDTH, HEIGHT, MARGIN = 420, 160, 12
"""Size of the curve in pixels."""

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
"""Colors of the lines; further lines are left out."""


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, whose cells can redraw their output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class CellDisplay:
    """Draws the events of a run below the current cell. Needs IPython."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML("<pre>starting the run</pre>"), display_id=True)
        self._title, self._status = "", "starting"
        self._progress, self._drawn_at = "", 0.0
        self._time_left = TimeLeft(None)
        self._table = EpochTable()
        self._rows: list[tuple[tuple[str, ...], str]] = []  # each with its header
        self._notices: list[str] = []
        self._monitor = ""
        self._curves: dict[str, list[tuple[int, float]]] = {}

    def handle(self, event: Event) -> None:
        match event:
            case WorkerOutput(text, to_stderr):
                print(text, file=sys.stderr if to_stderr else sys.stdout)
                return
            case RunStarted(run):
                self._title, self._status = f"{run.experiment} {run.name}", "starting workers"
                self._monitor = (run.config.get("cfg") or {}).get("monitor") or ""
            case StepProgress():
                self._step(event)
                if time.monotonic() - self._drawn_at < REDRAW_S:
                    return
            case EpochEnded():
                self._epoch(event)
            case Notice(text) if text not in self._notices:
                self._notices.append(f"{WARNING}{text}" if isinstance(event, WarningNotice) else text)
            case WorkersStarted():
                self._notices = [text for text in self._notices if text.startswith(WARNING)]  # of the start
            case RunEnded(status):
                self._status, self._progress = status, ""
            case _:
                return
        self._draw()

    def _step(self, event: StepProgress) -> None:
        self._status = "training"
        numbers = [f"{event.rate:.1f} it/s", self._time_left.text(event)] if event.rate else []
        where = f"epoch {event.epoch + 1} {event.stage} {event.step}/{event.steps}"
        self._progress = " | ".join([where, *filter(None, numbers)])

    def _epoch(self, event: EpochEnded) -> None:
        self._time_left.epoch(event)
        self._progress = ""
        lines = list(self._table.lines(event, 120))
        new = tuple(line for line, is_header in lines if is_header)
        header = new or self._rows[-1][0]
        self._rows += [(header, line) for line, is_header in lines if not is_header]
        for name, value in event.values.items():
            self._curves.setdefault(name, []).append((event.epoch + 1, value))

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        lines = [f"<b>{escape(self._title)}</b> {self._status}".removeprefix("<b></b> ")]
        if len(self._rows) > ROWS:
            lines.append(f"the last {ROWS} of {len(self._rows)} epochs")
        for header, rows in itertools.groupby(self._rows[-ROWS:], key=lambda row: row[0]):
            lines += [f"<b>{escape(line)}</b>" for line in header]
            lines += [escape(row) for _, row in rows]
        lines += map(escape, filter(None, [*self._notices, self._progress]))
        drawn = curve(self._curves, self._monitor)
        self._handle.update(self._html(f"{drawn}<pre>{chr(10).join(lines)}</pre>"))


def curve(series: Mapping[str, Sequence[tuple[int, float]]], monitor: str) -> str:
    """Draw a metric by epoch, one line per pass, as SVG: `cfg.monitor`, or else the first. Return "" without metrics.

    Args:
        series: points of each metric: the epoch, from 1, and the value.
        monitor: name of a metric, like `val/loss`.
    """
    name = monitor if monitor in series else next(iter(series), "")
    metric = name.partition("/")[2] or name
    shown = {title: _finite(series[title]) for title in series if (title.partition("/")[2] or title) == metric}
    shown = {title: points for title, points in list(shown.items())[: len(COLORS)] if points}
    if max(map(len, shown.values()), default=0) < 2:
        return ""
    epochs = [epoch for points in shown.values() for epoch, _ in points]
    values = [value for points in shown.values() for _, value in points]
    left, right, low, high = min(epochs), max(epochs), min(values), max(values)
    parts = []
    for color, (title, points) in zip(COLORS, shown.items(), strict=False):
        spots = " ".join(
            f"{MARGIN + _share(epoch, left, right) * (WIDTH - 2 * MARGIN):.1f},"
            f"{HEIGHT - MARGIN - _share(value, low, high) * (HEIGHT - 2 * MARGIN):.1f}"
            for epoch, value in points
        )
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{spots}"/>')
        y = 14 * (len(parts) // 2 + 1)
        parts.append(f'<text x="{WIDTH}" y="{y}" fill="{color}">{escape(title)} {format_number(points[-1][1])}</text>')
    axis = '<text x="0" y="{}" fill="gray">{}</text>'
    parts += [axis.format(10, format_number(high)), axis.format(HEIGHT, format_number(low))]
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT}" fill="gray">epochs {left} to {right}</text>')
    size = f'width="{WIDTH + 200}" height="{HEIGHT + 4}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">{"".join(parts)}</svg>'


def _finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(epoch, value) for epoch, value in points if abs(value) < float("inf")]


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
