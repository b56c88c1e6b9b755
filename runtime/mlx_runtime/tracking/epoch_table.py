"""The table printed during training: one row per epoch, no wider than the terminal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_runtime.events import EpochEnded

NARROWEST = 7
"""Width of a number where space is scarce: `-0.1234`, `1.2e-05`."""

NATURAL = 8
"""Width of a number where there is enough space: `1234.568`, `1.23e-05`."""

WAITING_PCT = 10
"""Percentage of an epoch's time spent waiting for data above which the table shows it."""

WAITING_S = 1.0
"""Minimum duration of an epoch for the table to show it."""

TIME = "time"


class Column(NamedTuple):
    """A column of the table; `stage` is the name of the stage if it is the stage's first column, else empty."""

    title: tuple[str, ...]  # in lines
    width: int
    gap: int = 1  # spaces before it
    stage: str = ""


@dataclass(frozen=True)
class Layout:
    """Columns of the table: the epoch, the metrics, the speed if there is room, and the time."""

    names: tuple[str, ...]  # metrics shown, in order
    left_out: tuple[str, ...]  # metrics that do not fit
    columns: tuple[Column, ...]
    unit: str  # of the speed, like `samples`; empty without a column for it

    @property
    def header(self) -> list[str]:
        stages, end = "", 0
        for column in self.columns:
            if column.stage:
                stages = f"{stages:<{end + column.gap}}{column.stage}"
            end += column.gap + column.width
        height = max(len(column.title) for column in self.columns)
        titles = [[""] * (height - len(column.title)) + list(column.title) for column in self.columns]
        lines = [self.row(cells) for cells in zip(*titles, strict=True)]
        return [stages, *lines] if stages else lines

    def row(self, cells: Sequence[str]) -> str:
        parts = zip(cells, self.columns, strict=True)
        return "".join(f"{' ' * column.gap}{cell:>{column.width}}" for cell, column in parts).rstrip()

    @property
    def width(self) -> int:
        """Length of the longest line, in characters."""
        return max(map(len, [self.row(["x" * column.width for column in self.columns]), *self.header]))


class EpochTable:
    """The table as lines of text. A header appears only when the columns change."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._request: tuple[Any, ...] = ()
        self._previous: set[str] = set()

    def lines(self, event: EpochEnded, width: int | None) -> Iterator[tuple[str, bool]]:
        """Yield each line of an epoch, and True if it belongs to a header. `width` is the terminal's, or None."""
        label = f"{event.epoch + 1}/{event.epochs}".removesuffix("/0")
        size = max(len("epoch"), 2 * len(str(event.epochs)) + 1, len(label))
        known = set(self._layout.names + self._layout.left_out) if self._layout else set()
        new, names = set(event.values), list(event.values)
        if new <= known and self._layout is not None:
            names = [*self._layout.names, *self._layout.left_out]
        elif new <= self._previous:  # a loop that alternates between different metrics
            names += [name for name in sorted(known) if name not in new]
        unit = "" if event.samples_per_s is None else next(iter(event.row_counts), "samples")
        if not unit and self._layout is not None and not known.isdisjoint(names):
            unit = self._request[3]
        request = (tuple(names), width, size, unit)
        if self._layout is None or request != self._request:
            self._previous = known
            self._layout = layout(names, width, size, unit)
            self._request = ((*self._layout.names, *self._layout.left_out), *request[1:])
            yield from ((line, True) for line in self._layout.header)
            if self._layout.left_out:
                yield f"no room for {', '.join(self._layout.left_out)}; metrics.jsonl has them", False
        yield from ((line, False) for line in _rows(self._layout, label, event, width))


def _rows(columns: Layout, label: str, event: EpochEnded, width: int | None) -> Iterator[str]:
    cells = [
        format_number(event.values[name], column.width) if name in event.values else ""
        for name, column in zip(columns.names, columns.columns[1:], strict=False)
    ]
    speed = (event.samples_per_s or 0.0) * event.row_counts.get(columns.unit, 1)
    rate = [f"{speed:,.0f}" if event.samples_per_s is not None else ""] if columns.unit else []
    row = columns.row([label, *cells, *rate, duration(event.seconds)])
    waited = event.data_wait_pct or 0
    note = f"{waited:.0f} % waiting for data" if waited >= WAITING_PCT and event.seconds >= WAITING_S else ""
    if note and width is not None and len(row) + 2 + len(note) > width:
        yield row
        yield f"{'':<{columns.columns[0].width}} {note}"
    else:
        yield f"{row}  {note}".rstrip()


def layout(names: Sequence[str], width: int | None, first: int, unit: str) -> Layout:
    """Fit the metrics of an epoch into the terminal: wrap titles first, then omit the speed, then metrics.

    The metrics of a stage are grouped. `first` is the width of the first column.
    """
    stages = list(dict.fromkeys(_stage(name) for name in names))
    ordered = sorted(names, key=lambda name: (bool(_stage(name)), stages.index(_stage(name))))
    for shown, roomy in ((unit, True), (unit, False), ("", True), ("", False)):
        columns = _arrange(ordered, [], first, shown, roomy=roomy)
        if width is None or columns.width <= width:
            return columns
    assert width is not None
    left_out: list[str] = []
    while len(ordered) > 1 and columns.width > width:
        training = [name for name in ordered if name.startswith("train")]
        # The first metric of each stage is usually its loss.
        others = [name for name in reversed(training or ordered) if name != ordered[0]]
        left_out.insert(0, others[0] if others else ordered[-1])
        ordered.remove(left_out[0])
        columns = _arrange(ordered, left_out, first, "", roomy=False)
    return columns


def _arrange(names: Sequence[str], left_out: Sequence[str], first: int, unit: str, *, roomy: bool) -> Layout:
    narrowest = NATURAL if roomy else NARROWEST
    columns = [Column(("epoch",), first, gap=0)]
    stage = None
    for name in names:
        title = _wrap(name.partition("/")[2] or name, narrowest, whole_words=roomy)
        begins, previous, stage = _stage(name) != stage, stage, _stage(name)
        gap = 2 if roomy and begins and previous is not None else 1
        columns.append(Column(title, max(narrowest, *map(len, title)), gap, stage if begins else ""))
    columns += [Column((f"{unit}/s",), max(len(unit) + 2, 9))] if unit else []
    columns.append(Column((TIME,), 6))
    return Layout(tuple(names), tuple(left_out), tuple(columns), unit)


def _wrap(title: str, least: int, *, whole_words: bool) -> tuple[str, ...]:
    """Wrap a name after `_` and `/`, and within long words unless they must stay whole."""
    words = re.findall(r"[^_/]*[_/]?", title)[:-1]
    if not whole_words:
        words = [part for word in words for part in ([word] if len(word) <= 8 else re.findall(".{1,7}", word))]
    width = max(least, *map(len, words))
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return tuple(lines)


def _stage(name: str) -> str:
    stage, slash, _ = name.partition("/")
    return stage if slash else ""


def format_number(value: float, width: int = 99) -> str:
    """Format a number with up to four decimals, fewer if they do not fit into `width` characters."""
    plain = value == 0 or 1e-3 <= abs(value) < 1e4
    forms = [f"{value:.{digits}f}" for digits in (4, 3, 2, 1)] if plain else [f"{value:.2e}", f"{value:.1e}"]
    return next((text for text in forms if len(text) <= width), f"{value:.0f}" if plain else f"{value:.0e}")


def duration(seconds: float, *, tenths: bool = True) -> str:
    """Format a time in at most six characters: `0.2 s`, `45 s`, `12 min`, `3.5 h`."""
    if tenths and seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, length in (("s", 1), ("min", 60)):
        if seconds < 99.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"
