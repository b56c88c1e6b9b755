"""The console of a run: progress bars on a terminal, lines in a pipe, a table of epochs."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlx_runtime.events import EpochEnded, Event, Notice, PreparationProgress, StepProgress, WarningNotice, WorkerOutput
from mlx_runtime.runs.tables import format_duration, format_number

LINES_PER_EPOCH = 5
"""Maximum number of lines that a pass prints in a pipe."""

RECENT_EPOCHS = 5
"""Number of latest epochs whose mean estimates the remaining time; the first epochs take longer."""

SECONDS_PER_LINE = 2.0
"""Minimum time between two lines of a pass in a pipe, so that short epochs print only their summary."""

NUMBER = 8
"""Width of a number in the table of epochs: `-0.1234`, `1.23e-05`."""

WAITING_PCT, WAITING_S = 10, 1.0
"""The table shows the time spent waiting for data from this percentage of an epoch, if it takes this long."""


class _Screen(Console):
    """A console that raises on a broken pipe; rich's own exits with status 1 and no message to record."""

    def on_broken_pipe(self) -> None:
        raise


class Display:
    """Display of events on a terminal or in a pipe.

    Args:
        copy: receives the output for a pipe, whatever `stream` is.
        epochs: total number, to estimate the remaining time; None if unknown until the first epoch ends.
        quiet: display only lines with `always=True`, warnings and workers' output; `copy` still receives everything.
    """

    def __init__(
        self, stream: TextIO, copy: TextIO | None = None, *, epochs: int | None = None, quiet: bool = False
    ) -> None:
        self._copy = Display(copy, epochs=epochs) if copy is not None else None
        self._quiet = quiet
        self._time_left = TimeLeft(epochs)
        self._table = EpochTable()
        self._shown_once: set[str] = set()
        self._console = _Screen(file=stream, highlight=False, soft_wrap=True)
        self._draws_bars = self._console.is_terminal
        self._bar: Progress | None = None  # below all lines, removed at the end
        self._task = TaskID(0)
        self._stage: tuple[str, int] | None = None
        self._last_line = time.monotonic()

    def handle(self, event: Event) -> None:
        """Display an event, if it is of interest to users."""
        match event:
            case WorkerOutput():
                return self._output(event)
            case PreparationProgress(name, done, rows):
                return self.show_progress(f"prepare {name}", done, rows, " rows")
        if self._copy is not None:
            self._copy.handle(event)
        if self._quiet and not isinstance(event, WarningNotice):
            return None
        match event:
            case StepProgress():
                self._step(event)
            case EpochEnded():
                self._epoch(event)
            case Notice(text, once) if text not in self._shown_once:
                self._shown_once |= {text} if once else set()
                self._line(f"warning   {text}" if isinstance(event, WarningNotice) else text)

    def print(self, text: str = "", *, always: bool = False) -> None:
        """Print a line, above the bar if there is one; on a quiet display only if `always`."""
        if self._copy is not None:
            self._copy.print(text)
        if always or not self._quiet:
            self._line(text)

    def show_progress(self, title: str, done: int, total: int, unit: str = "") -> None:
        """Show progress: with a bar on a terminal, otherwise with at most one line per 10 %."""
        if self._copy is not None:
            self._copy.show_progress(title, done, total, unit)
        if self._quiet:
            return
        if self._draws_bars:
            self._draw(title, done, total, TimeRemainingColumn())
            if done == total:
                self.close()
        elif (stage := (title, 10 * done // total)) != self._stage and self._line_due():
            self._stage = stage
            self._line(f"{title} | {done:,}/{total:,}{unit}")

    def step_aside(self) -> bool:
        """Leave the terminal to a debugger: remove the bar, and print only lines from now on. Return True."""
        self.close()
        self._draws_bars = False
        return True

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, title: str, done: int, total: int, last: TextColumn | TimeRemainingColumn) -> None:
        if self._bar is None:
            self._bar = Progress(console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(title, total=total)
        self._bar.columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), last)
        self._bar.update(self._task, description=title, total=total, completed=done)

    def _output(self, event: WorkerOutput) -> None:
        to_stderr = event.to_stderr and self._bar is None
        logged = to_stderr and not sys.stderr.isatty()  # the driver's own log receives them through stderr
        if self._copy is not None and not logged:
            self._copy.handle(WorkerOutput(event.text, to_stderr=False))
        if self._bar is not None:
            self._bar.console.out(event.text, highlight=False)
        else:
            print(event.text, file=sys.stderr if to_stderr else self._console.file, flush=True)

    def _step(self, event: StepProgress) -> None:
        if (stage := (event.stage, event.epoch)) != self._stage:
            self._stage, self._last_line = stage, time.monotonic()
        numbers = _numbers(event, self._time_left.text(event))
        if self._draws_bars:
            text = TextColumn(" | ".join(numbers).replace("{", "{{").replace("}", "}}"), markup=False)  # it is a format
            self._draw(f"epoch {event.epoch + 1} {event.stage}", event.step, event.steps, text)
        elif event.step % max(1, event.steps // LINES_PER_EPOCH) == 0 and self._line_due():
            self._line(" | ".join([event.stage, f"{event.step}/{event.steps}", *numbers]))

    def _epoch(self, event: EpochEnded) -> None:
        self._time_left.epoch(event)
        width = self._console.width if self._console.is_terminal else None
        for text, is_header in self._table.lines(event, width):
            self._line(text, style="bold" if is_header else "")

    def _line_due(self) -> bool:
        """Return True, and store the time, if the last line was printed long enough ago."""
        if time.monotonic() - self._last_line < SECONDS_PER_LINE:
            return False
        self._last_line = time.monotonic()
        return True

    def _line(self, text: str, style: str = "") -> None:
        # `style` of `print` itself would apply to the bar as well.
        console = self._bar.console if self._bar is not None else self._console
        console.print(Text(text, style=style) if style else text, markup=False)


class _Column(NamedTuple):
    title: str
    width: int
    stage: str = ""


class EpochTable:
    """A table with one row per epoch as lines of text. A header appears only when the columns change."""

    def __init__(self) -> None:
        self._names: list[str] = []  # metrics of the table, grouped by stage
        self._seen: dict[str, None] = {}  # all metrics of earlier tables, too
        self._request: tuple[tuple[str, ...], int | None, int, str] = ((), None, 0, "")
        self._shown: list[str] = []  # metrics that the terminal has room for
        self._unit = ""  # of the speed; empty without a column for it
        self._columns: list[_Column] = []

    def lines(self, event: EpochEnded, width: int | None) -> Iterator[tuple[str, bool]]:
        """Yield each line of an epoch, and True if it belongs to a header. `width` is the terminal's, or None."""
        label = f"{event.epoch + 1}/{event.epochs}".removesuffix("/0")
        if new := [name for name in event.values if name not in self._names]:
            # What is recorded by itself, like the test metrics, gets its own columns, but not again and again.
            names = [*(self._names if self._seen.keys() & event.values.keys() else ()), *new]
            self._seen |= dict.fromkeys(names)
            stages = list(dict.fromkeys(map(_stage, self._seen)))
            self._names = sorted(names, key=lambda name: ("/" in name, stages.index(_stage(name))))
        unit = next(iter(event.row_counts), "samples") if event.samples_per_s is not None else ""
        request = (tuple(self._names), width, max(5, 2 * len(str(event.epochs)) + 1, len(label)), unit)
        if request[:3] != self._request[:3] or unit not in ("", self._request[3]):
            self._request = request
            yield from self._header(*request)
        seconds = f"{event.seconds:.1f} s" if event.seconds < 9.95 else format_duration(event.seconds, 1)
        cells = [format_number(event.values.get(name)) for name in self._shown]
        if self._unit:
            speed = (event.samples_per_s or 0.0) * event.row_counts.get(self._unit, 1)
            cells.append("" if event.samples_per_s is None else f"{speed:,.0f}")
        waited = event.data_wait_pct or 0
        note = f"  {waited:.0f} % waiting for data" if waited >= WAITING_PCT and event.seconds >= WAITING_S else ""
        yield f"{self._row([label, *cells, seconds])}{note}", False

    def _header(self, names: Sequence[str], width: int | None, first: int, unit: str) -> Iterator[tuple[str, bool]]:
        """Choose the columns. Without room for all, the speed is left out, then metrics but the first of each stage."""
        self._shown, self._unit, left_out = list(names), unit, list[str]()
        while True:
            titles = [(name.partition("/")[2] or name, _stage(name)) for name in self._shown]
            columns = [_Column(title, max(NUMBER, len(title)), stage) for title, stage in titles]
            columns += [_Column(f"{self._unit}/s", max(9, len(self._unit) + 2))] if self._unit else []
            self._columns = [_Column("epoch", first), *columns, _Column("time", 6)]
            if width is None or sum(column.width + 1 for column in self._columns) <= width + 1 or len(self._shown) < 2:
                break
            if self._unit:
                self._unit = ""
                continue
            leading = {_stage(name): name for name in reversed(self._shown)}.values()
            left_out.append(next((name for name in self._shown if name not in leading), self._shown[-1]))
            self._shown.remove(left_out[-1])
        stages, end, before = "", 0, ""
        for column in self._columns:
            if column.stage not in ("", before):
                stages = f"{stages:<{end}}{column.stage}"
            end, before = end + column.width + 1, column.stage
        yield from [(stages, True)] if stages else []
        yield self._row([column.title for column in self._columns]), True
        if left_out:
            yield f"no room for {', '.join(left_out)}; metrics.jsonl has them", False

    def _row(self, cells: Sequence[str]) -> str:
        pairs = zip(cells, self._columns, strict=True)
        return " ".join(f"{cell:>{column.width}}" for cell, column in pairs).rstrip()


def _stage(name: str) -> str:
    stage, slash, _ = name.partition("/")
    return stage if slash else ""


class TimeLeft:
    """Estimate of the remaining time of a pass and, if the number of epochs is known, of the run."""

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        self._seconds: dict[int, float] = {}
        self._epoch_started: float | None = None

    def epoch(self, event: EpochEnded) -> None:
        """Add the duration of an epoch, or of the code after its checkpoint."""
        self._epochs = self._epochs or event.epochs
        self._seconds[event.epoch] = self._seconds.get(event.epoch, 0.0) + event.seconds
        self._epoch_started = time.monotonic()

    def text(self, event: StepProgress) -> str:
        """Return the estimate, like `8 s left, 3 min in all`; the second part only if it is known and longer."""
        present = time.monotonic()
        self._epoch_started = present if self._epoch_started is None else self._epoch_started
        if not event.rate:
            return ""
        of_pass = (event.steps - event.step) / event.rate
        text = f"{format_duration(of_pass)} left"
        if self._epochs is None or event.epoch in self._seconds:
            return text  # after the end of an epoch it is unknown whether another follows
        elapsed = present - self._epoch_started
        recent = list(self._seconds.values())[-RECENT_EPOCHS:]
        of_one = sum(recent) / len(recent) if recent else elapsed + of_pass
        of_epoch = max(of_pass, of_one - elapsed)
        more = self._epochs - event.epoch - 1
        if more <= 0 and of_epoch <= of_pass:
            return text
        return f"{text}, {format_duration(of_epoch + more * of_one)} in all"


def _numbers(event: StepProgress, left: str) -> list[str]:
    """Return `33.1 it/s`, `8 s left`, `loss 0.1234`; names of metrics lack that of the pass."""
    numbers = [f"{name.partition('/')[2]} {format_number(value)}" for name, value in event.values.items()]
    return ([f"{event.rate:.1f} it/s"] if event.rate else []) + ([left] if left else []) + numbers
