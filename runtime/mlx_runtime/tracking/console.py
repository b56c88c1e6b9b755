"""The console of a run: progress bars on a terminal, lines in a pipe, a table of epochs."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlx_runtime.events import EpochEnded, Event, Notice, PreparationProgress, StepProgress, WarningNotice, WorkerOutput
from mlx_runtime.runs.tables import format_duration, format_number

LINES_PER_EPOCH = 5
"""Maximum number of lines that a pass prints in a pipe."""

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
        stream: the terminal, file or pipe.
        log: writes text to the log of the run, which receives everything as lines.
        epochs: total number, to estimate the remaining time; None if unknown until the first epoch ends.
        quiet: display only lines with `always=True`, warnings and workers' output.
    """

    def __init__(
        self,
        stream: TextIO,
        log: Callable[[str], object] = lambda text: None,
        *,
        epochs: int | None = None,
        quiet: bool = False,
    ) -> None:
        self._log, self._quiet = log, quiet
        self._time_left = TimeLeft(epochs)
        self._table = EpochTable()
        self._shown_once: set[str] = set()
        self._console = _Screen(file=stream, highlight=False, soft_wrap=True)
        self._draws_bars = self._console.is_terminal and not quiet
        self._bar: Progress | None = None  # below all lines, removed at the end
        self._task = TaskID(0)
        self._stage: tuple[str, int] | None = None
        self._last_line = time.monotonic()

    def handle(self, event: Event) -> None:
        """Display an event, if it is of interest to users."""
        match event:
            case WorkerOutput():
                self._output(event)
            case PreparationProgress(name, done, rows):
                self.show_progress(f"prepare {name}", done, rows, " rows")
            case StepProgress():
                self._step(event)
            case EpochEnded():
                self._time_left.epoch(event)
                width = self._console.width if self._console.is_terminal else None
                for text, is_header in self._table.lines(event, width):
                    self._line(text, shown=not self._quiet, style="bold" if is_header else "")
            case Notice(text, once) if text not in self._shown_once:
                self._shown_once |= {text} if once else set()
                warning = isinstance(event, WarningNotice)
                self.print(f"warning   {text}" if warning else text, always=warning)

    def print(self, text: str = "", *, always: bool = False) -> None:
        """Print a line, above the bar if there is one; on a quiet display only if `always`."""
        self._line(text, shown=always or not self._quiet)

    def show_progress(self, title: str, done: int, total: int, unit: str = "") -> None:
        """Show progress: with a bar on a terminal, otherwise with at most one line per 10 %."""
        if self._draws_bars:
            self._draw(title, done, total, TimeRemainingColumn())
            if done == total:
                self.close()
        stage = (title, 10 * done // max(1, total))
        if stage != self._stage and self._progress(f"{title} | {done:,}/{total:,}{unit}"):
            self._stage = stage

    def step_aside(self) -> None:
        """Leave the terminal to a debugger: remove the bar, and print only lines from now on."""
        self.close()
        self._draws_bars = False

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
        if not to_stderr or sys.stderr.isatty():  # otherwise, the log receives it through stderr
            self._log(f"{event.text}\n")
        if self._bar is not None:
            self._console.out(event.text, highlight=False)
        else:
            print(event.text, file=sys.stderr if to_stderr else self._console.file, flush=True)

    def _step(self, event: StepProgress) -> None:
        if (stage := (event.stage, event.epoch)) != self._stage:
            self._stage, self._last_line = stage, time.monotonic()
        numbers = _numbers(event, self._time_left.text(event))
        if self._draws_bars:
            text = TextColumn(" | ".join(numbers).replace("{", "{{").replace("}", "}}"), markup=False)  # it is a format
            self._draw(f"epoch {event.epoch + 1} {event.stage}", event.step, event.steps, text)
        if event.step % max(1, event.steps // LINES_PER_EPOCH) == 0:
            self._progress(" | ".join([event.stage, f"{event.step}/{event.steps}", *numbers]))

    def _progress(self, text: str) -> bool:
        """Print a line where there are no bars, if the last one was printed long enough ago. Return True if it was."""
        if time.monotonic() - self._last_line < SECONDS_PER_LINE:
            return False
        self._last_line = time.monotonic()
        self._line(text, shown=not (self._draws_bars or self._quiet))
        return True

    def _line(self, text: str, *, shown: bool, style: str = "") -> None:
        self._log(f"{text}\n")
        if shown:
            # `style` of `print` itself would apply to the bar as well.
            self._console.print(Text(text, style=style) if style else text, markup=False)


class _Column(NamedTuple):
    name: str  # of a metric; `/epoch`, `/speed` and `/time` are no metrics
    title: str
    width: int
    stage: str = ""


class EpochTable:
    """A table with one row per epoch as lines of text. A header appears only when the columns change."""

    def __init__(self) -> None:
        self._names: list[str] = []  # metrics of the table
        self._seen: dict[str, None] = {}  # metrics of earlier tables, too
        self._unit: str | None = None  # of the speed; None without a column for it
        self._width: int | None = None
        self._columns: list[_Column] = []

    def lines(self, event: EpochEnded, width: int | None) -> Iterator[tuple[str, bool]]:
        """Yield each line of an epoch, and True if it belongs to a header. `width` is the terminal's, or None."""
        new = [name for name in event.values if name not in self._names]
        unit = None if new else self._unit
        unit = unit if event.samples_per_s is None else next(iter(event.row_counts), "samples")
        if new or (unit, width) != (self._unit, self._width):
            # What is recorded by itself, like the test metrics, gets its own columns, but not again and again.
            names = [*(self._names if self._seen.keys() & event.values.keys() else ()), *new]
            self._seen |= dict.fromkeys(names)
            stages = list(dict.fromkeys(map(_stage, self._seen)))
            self._names = sorted(names, key=lambda name: ("/" in name, stages.index(_stage(name))))
            self._unit, self._width = unit, width
            yield from self._header(2 * len(str(event.epochs)) + 1)
        speed = (event.samples_per_s or 0.0) * event.row_counts.get(unit or "", 1)
        cells = {name: format_number(value) for name, value in event.values.items()} | {
            "/epoch": f"{event.epoch + 1}/{event.epochs}".removesuffix("/0"),
            "/speed": "" if event.samples_per_s is None else f"{speed:,.0f}",
            "/time": f"{event.seconds:.1f} s" if event.seconds < 9.95 else format_duration(event.seconds, 1),
        }
        waited = event.data_wait_pct or 0
        note = f"  {waited:.0f} % waiting for data" if waited >= WAITING_PCT and event.seconds >= WAITING_S else ""
        yield f"{self._row([cells.get(column.name, '') for column in self._columns])}{note}", False

    def _header(self, label: int) -> Iterator[tuple[str, bool]]:
        """Choose the columns that fit, in their order."""
        titles = [(name, name.partition("/")[2] or name, _stage(name)) for name in self._names]
        columns = [_Column(name, title, max(NUMBER, len(title)), stage) for name, title, stage in titles]
        columns += [_Column("/speed", f"{self._unit}/s", max(9, len(self._unit) + 2))] if self._unit else []
        first, last = _Column("/epoch", "epoch", max(5, label)), _Column("/time", "time", 6)
        room = (self._width or sys.maxsize) - first.width - last.width - 1
        ends = accumulate(column.width + 1 for column in columns)
        fitting = [column for column, end in zip(columns, ends, strict=True) if end <= room]
        self._columns = [first, *fitting, last]
        stages, end, before = "", 0, ""
        for column in self._columns:
            if column.stage not in ("", before):
                stages = f"{stages:<{end}}{column.stage}"
            end, before = end + column.width + 1, column.stage
        yield from [(stages, True)] if stages else []
        yield self._row([column.title for column in self._columns]), True
        if left_out := columns[len(fitting) :]:
            yield f"no room for {', '.join(column.name.lstrip('/') for column in left_out)}; see metrics.jsonl", False

    def _row(self, cells: Sequence[str]) -> str:
        pairs = zip(cells, self._columns, strict=True)
        return " ".join(f"{cell:>{column.width}}" for cell, column in pairs).rstrip()


def _stage(name: str) -> str:
    stage, slash, _ = name.partition("/")
    return stage if slash else ""


class TimeLeft:
    """Estimate of the remaining time of a pass and, if the number of epochs is known, of the run.

    All epochs are assumed to take as long as the latest one; during the first, as it takes until the end of its pass.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        self._ended, self._epoch_s = -1, 0.0  # the latest epoch that has ended, and its duration
        self._began: float | None = None  # the epoch after it

    def epoch(self, event: EpochEnded) -> None:
        """Note the duration of an epoch, or of the code after its checkpoint."""
        self._epochs = self._epochs or event.epochs
        self._epoch_s = event.seconds + (self._epoch_s if event.epoch == self._ended else 0.0)
        self._ended, self._began = event.epoch, time.monotonic()

    def text(self, event: StepProgress) -> str:
        """Return the estimate, like `8 s left, 3 min in all`; the second part only if it is known and longer."""
        present = time.monotonic()
        self._began = present if self._began is None else self._began
        if not event.rate:
            return ""
        of_pass = (event.steps - event.step) / event.rate
        text = f"{format_duration(of_pass)} left"
        if not self._epochs or event.epoch == self._ended:
            return text  # after the end of an epoch it is unknown whether another follows
        elapsed = present - self._began
        of_run = (self._epochs - event.epoch) * (self._epoch_s or elapsed + of_pass) - elapsed
        return f"{text}, {format_duration(of_run)} in all" if of_run > of_pass else text


def _numbers(event: StepProgress, left: str) -> list[str]:
    """Return `33.1 it/s`, `8 s left`, `loss 0.1234`; names of metrics lack that of the pass."""
    numbers = [f"{name.partition('/')[2]} {format_number(value)}" for name, value in event.values.items()]
    return ([f"{event.rate:.1f} it/s"] if event.rate else []) + ([left] if left else []) + numbers
