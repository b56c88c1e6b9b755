"""The table of epochs that a run prints while it trains: one row each, as wide as the terminal."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NARROWEST = 7
"""Columns of a number where there is little room: `-0.1234`, `1.2e-05`."""

NATURAL = 8
"""The same where there is enough: `1234.568`, `1.23e-05`."""

WAITING_PCT = 10
"""Of an epoch's time spent waiting for data, from which on the table says so, if the epoch takes a while."""

WAITING_S = 1.0
"""Such a while."""

RATE, TIME = "samples/s", "time"


@dataclass(frozen=True)
class Layout:
    """Where everything stands.

    Attributes:
        names: of the numbers that are shown, in order.
        left_out: of those for which there is no room.
        columns: width and the lines of the title of each column, the first and the last ones included.
        groups: where each stage begins, in characters, and its name.
        rate: whether there is a column for samples per second.
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    columns: tuple[tuple[int, tuple[str, ...]], ...]
    groups: tuple[tuple[int, str], ...]
    rate: bool

    @property
    def header(self) -> list[str]:
        """The lines above the rows."""
        stages = ""
        for start, name in self.groups:
            stages = f"{stages:<{start}}{name}"
        height = max(len(title) for _, title in self.columns)
        titles = [[""] * (height - len(title)) + list(title) for _, title in self.columns]
        lines = [self.row([title[line] for title in titles]) for line in range(height)]
        return [stages, *lines] if stages.strip() else lines

    def row(self, cells: Sequence[str]) -> str:
        """A line of the table; a stage begins one column later than its neighbour ends."""
        text, starts = "", {start for start, _ in self.groups}
        for cell, (width, _) in zip(cells, self.columns, strict=True):
            gap = bool(text) + (len(text) + 2 in starts)
            text += f"{'':<{gap}}{cell:>{width}}"
        return text.rstrip()


class EpochTable:
    """Turns events of epochs into lines. A header comes only when the columns have changed."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._asked: tuple[Any, ...] = ()
        self._before: set[str] = set()

    def lines(self, event: Mapping[str, Any], width: int | None) -> Iterator[tuple[str, bool]]:
        """What to print of an epoch, and whether it is part of a header.

        Args:
            event: of kind `epoch`.
            width: of the terminal; None when there is no limit.
        """
        label = f"{event['epoch'] + 1}/{event['epochs']}"
        size = max(len("epoch"), 2 * len(str(event["epochs"])) + 1, len(label))
        known = set(self._layout.names + self._layout.left_out) if self._layout else set()
        new, names = set(event["values"]), list(event["values"])
        if new <= known and self._layout is not None:
            names = [*self._layout.names, *self._layout.left_out]
        elif new <= self._before:  # a loop that records by turns
            names += [name for name in sorted(known) if name not in new]
        had_rate = self._layout is not None and self._asked[3] and not known.isdisjoint(names)
        asked = (tuple(names), width, size, "samples_per_s" in event or had_rate)
        if self._layout is None or asked != self._asked:
            self._before = known
            self._layout = layout(names, width, size, rate=asked[3])
            self._asked = ((*self._layout.names, *self._layout.left_out), *asked[1:])
            yield from ((line, True) for line in self._layout.header)
            if self._layout.left_out:
                yield f"no room for {', '.join(self._layout.left_out)}; metrics.jsonl has them", False
        yield from ((line, False) for line in self._rows(label, event, width))

    def _rows(self, label: str, event: Mapping[str, Any], width: int | None) -> Iterator[str]:
        assert self._layout is not None
        widths = [size for size, _ in self._layout.columns[1:]]
        values = event["values"]
        cells = [
            shown(values[name], size) if name in values else ""
            for name, size in zip(self._layout.names, widths, strict=False)
        ]
        rate = [f"{event['samples_per_s']:,.0f}" if "samples_per_s" in event else ""] if self._layout.rate else []
        row = self._layout.row([label, *cells, *rate, duration(event["seconds"])])
        waited = event.get("data_wait_pct", 0)
        matters = waited >= WAITING_PCT and event["seconds"] >= WAITING_S
        note = f"{waited:.0f} % waiting for data" if matters else ""
        if note and width is not None and len(row) + 2 + len(note) > width:
            yield row
            yield f"{'':<{self._layout.columns[0][0]}} {note}"
        else:
            yield f"{row}  {note}".rstrip()


def layout(names: Sequence[str], width: int | None, first: int, *, rate: bool) -> Layout:
    """Find room for the numbers of an epoch: titles break first, then the rate goes, then numbers do.

    Args:
        names: like `train/loss`; those of a stage come to stand together.
        width: in characters, or None.
        first: width of the first column.
        rate: whether there are samples per second to show.
    """
    stages = list(dict.fromkeys(_stage(name) for name in names))
    ordered = sorted(names, key=lambda name: (bool(_stage(name)), stages.index(_stage(name))))
    found = _placed(ordered, [], first, rate=rate, roomy=True)
    if width is None or _width(found) <= width:
        return found
    for with_rate, roomy in ((rate, False), (False, True), (False, False)):
        found = _placed(ordered, [], first, rate=with_rate, roomy=roomy)
        if _width(found) <= width:
            return found
    left_out: list[str] = []
    while len(ordered) > 1 and _width(found) > width:
        training = [name for name in ordered if name.startswith("train")]
        # The first number of each stage is its loss, or what stands for it.
        others = [name for name in reversed(training or ordered) if name != ordered[0]]
        left_out.insert(0, others[0] if others else ordered[-1])
        ordered.remove(left_out[0])
        found = _placed(ordered, left_out, first, rate=False, roomy=False)
    return found


def _placed(names: Sequence[str], left_out: Sequence[str], first: int, *, rate: bool, roomy: bool) -> Layout:
    columns: list[tuple[int, tuple[str, ...]]] = [(first, ("epoch",))]
    groups: list[tuple[int, str]] = []
    at, stage = first, None
    for name in names:
        if _stage(name) != stage:
            stage = _stage(name)
            at += roomy and bool(groups)
            groups.append((at + 1, stage))
        title = _broken(name.partition("/")[2] or name, NATURAL if roomy else NARROWEST, whole=roomy)
        columns.append((max(NATURAL if roomy else NARROWEST, *map(len, title)), title))
        at += 1 + columns[-1][0]
    columns += [(len(RATE), (RATE,))] if rate else []
    columns.append((6, (TIME,)))
    return Layout(tuple(names), tuple(left_out), tuple(columns), tuple(groups), rate)


def _broken(title: str, least: int, *, whole: bool) -> tuple[str, ...]:
    """A name on several lines, broken after `_` and `/`, and within long words unless they must stay whole."""
    words = re.findall(r"[^_/]*[_/]?", title)[:-1]
    if not whole:
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


def _width(found: Layout) -> int:
    return max(map(len, [found.row(["x" * width for width, _ in found.columns]), *found.header]))


def shown(value: float, width: int) -> str:
    """A number in so many characters, with as many digits as there is room for."""
    plain = value == 0 or 1e-3 <= abs(value) < 1e4
    forms = [f"{value:.{digits}f}" for digits in (4, 3, 2, 1)] if plain else [f"{value:.2e}", f"{value:.1e}"]
    return next((text for text in forms if len(text) <= width), f"{value:.0f}" if plain else f"{value:.0e}")


def duration(seconds: float) -> str:
    """A time in at most six characters: `0.2 s`, `45 s`, `12 min`, `3.5 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, length in (("s", 1), ("min", 60)):
        if seconds < 99.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"
