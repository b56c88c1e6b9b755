"""The display of a run in a notebook cell: its state and a table of its epochs, redrawn while it trains."""

import itertools
import sys
import time
from collections import deque
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
from mlx_runtime.tracking.console import EpochTable

ROWS = 15
"""Number of latest epochs in the table."""

WIDTH = 120
"""Maximum number of characters of a row."""

WARNING = "warning: "

REDRAW_S = 0.5
"""Minimum time between two drawings while it trains."""


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
        self._cell = display(HTML("<pre>starting the run</pre>"), display_id=True)
        self._title, self._state, self._drawn_at = "", "", 0.0
        self._table, self._header = EpochTable(), ""
        self._rows: deque[tuple[str, str]] = deque(maxlen=ROWS)  # each with its header
        self._notices: dict[str, None] = {}

    def handle(self, event: Event) -> None:
        match event:
            case WorkerOutput(text, to_stderr):
                print(text, file=sys.stderr if to_stderr else sys.stdout)
                return
            case RunStarted(run):
                self._title, self._state = f"{run.experiment} {run.name}", "starting workers"
            case StepProgress(stage, epoch, step, steps, rate):
                self._state = f"epoch {epoch + 1} {stage} {step}/{steps} | {rate:.1f} it/s"
            case EpochEnded(epoch):
                self._state = f"epoch {epoch + 1}"
                lines = list(self._table.lines(event, WIDTH))
                self._header = "\n".join(line for line, is_header in lines if is_header) or self._header
                self._rows += [(self._header, line) for line, is_header in lines if not is_header]
            case Notice(text):
                self._notices[f"{WARNING}{text}" if isinstance(event, WarningNotice) else text] = None
            case WorkersStarted():
                self._notices = {text: None for text in self._notices if text.startswith(WARNING)}  # of the start
            case RunEnded(status):
                self._state = status
            case _:
                return
        if not isinstance(event, StepProgress) or time.monotonic() - self._drawn_at > REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        lines = [f"<b>{escape(self._title)}</b> {escape(self._state)}"]
        for header, rows in itertools.groupby(self._rows, key=lambda row: row[0]):
            lines += [f"<b>{escape(header)}</b>", *(escape(row) for _, row in rows)]
        lines += map(escape, self._notices)
        self._cell.update(self._html(f"<pre>{chr(10).join(lines)}</pre>"))
