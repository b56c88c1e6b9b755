"""The display of a sweep: a table of trials on a terminal, lines in a pipe, and the results."""

import io
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from mlx_runtime.companions.sweeps.definition import SweepPlan
from mlx_runtime.companions.sweeps.events import SweepEnded, SweepStarted, TrialEnded, TrialProgress, TrialStarted
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.scores import Trial, short_names
from mlx_runtime.companions.sweeps.space import WHOLE, Part
from mlx_runtime.errors import printable
from mlx_runtime.events import Event, StopRequested
from mlx_runtime.runs.checkpoints.index import score
from mlx_runtime.runs.tables import COLORS, format_duration, format_number, plural, print_table

RANKED = 10
"""Number of trials in the table at the end."""


@dataclass
class _Row:
    """A line of the live table: a run, or a trial after the end of all its runs."""

    values: Mapping[str, str]
    status: str = "RUNNING"
    epoch: str = ""
    value: float | None = None


_Key = tuple[int, Part]
"""A trial and one of its runs, or `WHOLE`."""


class SweepDisplay:
    """Draws the events of a sweep on a terminal or in a pipe.

    Args:
        plan: Plan of the sweep.
        stream: The terminal or pipe.
        copy: If `stream` is a terminal, receives the output for a pipe.
        quiet: Show only the folder of the sweep, failures and results.
    """

    def __init__(self, plan: SweepPlan, stream: TextIO, copy: TextIO | None = None, *, quiet: bool = False) -> None:
        self._plan, self._stream, self._copy, self._quiet = plan, stream, copy, quiet
        self._rows: dict[_Key, _Row] = {}
        self._started = time.monotonic()
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def handle(self, event: Event) -> None:
        """Draw an event."""
        match event:
            case SweepStarted():
                self._start(event)
            case TrialStarted(trial, part, values, run):
                self._rows[trial, part] = _Row(values)
                shown = " ".join(f"{key}={text}" for key, text in values.items())
                self._print(f"{_title(trial, part)} {run}  {shown}".rstrip(), live=False)
            case TrialProgress(trial, part, epoch, epochs, value):
                row = self._rows[trial, part]
                row.epoch = f"{epoch + 1}/{epochs}"
                row.value = value if value is not None else row.value
            case TrialEnded():
                self._end(event)
            case StopRequested(why):
                self._print(f"stopping  running trials save a checkpoint first ({why})", always=True)
            case SweepEnded():
                self.close()
                self._results(event)

    def close(self) -> None:
        """Remove the table."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def table(self) -> Table:
        """Return the live table: current runs, the best trial and, if there is room, the latest ended trials."""
        definition = self._plan.definition
        keys = [dimension.key for dimension in self._plan.space.dimensions]
        titles = short_names(keys)
        several = len(definition.parts) > 1
        run = [Column("run", no_wrap=True)] if several else []
        values = [Column(titles[key], no_wrap=True, overflow="ellipsis") for key in keys]
        fixed = [Column(title, no_wrap=True, justify="right") for title in ("epoch", definition.metric)]
        columns = [Column("trial", no_wrap=True), *run, *values, *fixed, Column("status", no_wrap=True)]
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        best = self._best()
        for (trial, part), row in self._visible(best, max(3, self._console.height - 3)):
            is_best = best is not None and (trial, part) == best
            of_folds = f"/{definition.folds}" if definition.folds else ""  # as in `seed 3 fold 1/5`
            of_run = ["mean" if part == WHOLE else part.title + of_folds] if several else []
            texts = [str(trial), *of_run, *(row.values.get(key, "") for key in keys), row.epoch]
            texts += [format_number(row.value), row.status + (" best" if is_best else "")]
            style = "bold" if is_best else COLORS.get(row.status, "")
            table.add_row(*(Text(text, style=style) for text in texts))
        return table

    def _visible(self, best: _Key | None, limit: int) -> list[tuple[_Key, _Row]]:
        rows = sorted(self._rows.items(), key=lambda item: item[0][0])  # of each, in the order of their start
        urgent = [item for item in rows if item[1].status == "RUNNING" or item[0] == best][:limit]
        others = [item for item in rows if item not in urgent]
        shown = urgent + others[max(0, len(others) - limit + len(urgent)) :]
        return [item for item in rows if item in shown]

    def _best(self) -> _Key | None:
        """Return the trial with the best value so far."""
        scores = {
            key: found
            for key, row in self._rows.items()
            if key[1] == WHOLE
            and row.status != "FAILED"
            and (found := score(row.value, self._plan.definition.mode)) > -math.inf
        }
        return max(scores, key=scores.__getitem__, default=None)

    def _start(self, event: SweepStarted) -> None:
        definition, folder = self._plan.definition, event.folder
        self._folder = folder
        counts = (definition.seeds, "seed"), (definition.folds, "fold")
        runs = " and ".join(plural(count, noun) for count, noun in counts if count)
        keys = ", ".join(dimension.key for dimension in self._plan.space.dimensions)
        search = f"{definition.search} over {keys}, " if keys else ""
        self._print(f"sweep     {folder.experiment} {folder.name}")
        self._print(f"folder    {folder.location}", always=True)
        self._print(f"trials    {search}{plural(definition.trials, 'trial')}{f' of {runs}' if runs else ''}")
        scheduler = f", pruned by {definition.scheduler}" if definition.scheduler != "none" else ""
        self._print(f"metric    {definition.metric} ({definition.mode}){scheduler}")
        if event.done:
            self._print(f"resumed   {plural(len(event.done), 'trial')} {'is' if len(event.done) == 1 else 'are'} done")
        for trial in event.done:
            row = _Row(trial.texts, trial.status, str(trial.epoch or ""), trial.score)
            self._rows[trial.number, WHOLE] = row
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, get_renderable=self.table, transient=True)
            self._live.start()

    def _end(self, event: TrialEnded) -> None:
        definition, trial = self._plan.definition, event.trial
        values = next((row.values for key, row in self._rows.items() if key[0] == trial), {})
        if event.part == WHOLE:
            self._rows = {key: row for key, row in self._rows.items() if key[0] != trial}
        key = trial, event.part
        row = self._rows[key] = _Row(values, event.status)
        found = ""
        if event.best is not None:
            row.epoch, row.value = str(event.best[0] + 1), event.best[1]
            found = f"  {definition.metric} {format_number(row.value)} (epoch {row.epoch})"
        best = ", best so far" if self._best() == key else ""
        why = f": {event.error.partition(chr(10))[0]}" if event.error else ""
        failed = event.status == "FAILED"
        self._print(f"{_title(trial, event.part)} {event.status}{found}{best}{why}", always=failed, live=failed)

    def _results(self, event: SweepEnded) -> None:
        """Print the best trials, and the command that trains the best configuration."""
        result = SweepResult(self._folder)
        facts = {"failed": f"{event.failed} of {plural(len(result.trials), 'trial')}"} if event.failed else {}
        if ranked := [trial for trial in result.ranked() if trial.metrics][:RANKED]:
            self._print(always=True)
            rows = [_cells(trial, result) for trial in ranked]
            print_table(rows, self._stream)
            if self._copy is not None:
                lines = io.StringIO()
                print_table(rows, lines)
                self._copy.write(lines.getvalue())
            self._print(always=True)
        if event.best is not None:
            best = result.best
            value = f"{result.metric} {best.shown[result.metric]}"
            facts["best"] = f"trial {best.number}, {value} (epoch {best.epoch})"
            facts["full run"] = result.command
            facts["report"] = shlex.join(["mlx", "xp", "report", self._folder.experiment, self._folder.name])
        elif ranked:
            facts["best"] = f"none: no trial has a finite value of {result.metric}"
        facts["took"] = format_duration(time.monotonic() - self._started)
        for name, text in facts.items():
            self._print(f"{name:<9} {text}", always=True)

    def _print(self, text: str = "", *, always: bool = False, live: bool = True) -> None:
        """Print a line: on a quiet display only if `always`, and above the live table only if `live`."""
        if self._copy is not None:
            print(text, file=self._copy)
        if (always or not self._quiet) and (live or self._live is None):
            self._console.print(Text(printable(text)))


def _title(trial: int, part: Part) -> str:
    """Return `trial 3`, or `trial 3 seed 0 fold 2`."""
    return f"trial {trial} {part.title}".rstrip()


def _cells(trial: Trial, result: SweepResult) -> dict[str, str]:
    """Return a row of the table at the end."""
    short = short_names([*trial.texts])
    runs = [row.folder.name for row, _ in trial.started]
    return {
        "trial": str(trial.number),
        **{short[key]: text for key, text in trial.texts.items()},
        result.metric: trial.shown[result.metric],
        "epoch": str(trial.epoch or "-"),
        "status": trial.status,
        "run": runs[0] if len(runs) == 1 else f"{runs[0]} … {runs[-1]}",
    }
