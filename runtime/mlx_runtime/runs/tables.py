"""Formats of tables and numbers for commands and pages."""

import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from mlx_runtime.errors import printable

WRAPPED = ("experiment", "metric")
"""Columns of listings that wrap on a narrow terminal; all others stay on one line."""

COLUMNS = ("experiment", "run", "status", "epoch", "metric", "best", "last", "workers", "age", "duration")
"""Columns of a listing of runs."""

COLORS = {"RUNNING": "cyan", "SUCCEEDED": "green", "PRUNED": "dim"}
COLORS |= dict.fromkeys(("FAILED", "STALE", "UNREADABLE"), "red")

MIN_WIDTH = 80

CELL = 100
"""Maximum length of a cell or title in a listing."""


def print_table(rows: Sequence[Mapping[str, str]], stream: TextIO, *, whole: bool = False) -> None:
    """Print rows with the same columns: drawn on a terminal, plain and aligned in a pipe or a narrow terminal.

    Cells and titles are cut at `CELL` characters, unless the `whole` text is needed.
    """
    if not rows:
        return
    fit = str if whole else shorten
    lines = [
        [fit(printable(text, one_line=True)) for text in line] for line in (rows[0], *(row.values() for row in rows))
    ]
    width = shutil.get_terminal_size().columns if stream.isatty() else 0
    if width >= MIN_WIDTH:
        _draw(lines, stream, width)
        return
    # Importing rich would take half as long again as all of `mlx xp ls` (see docs/decisions/0014-libraries.md).
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip(), file=stream)


def aligned(rows: Mapping[str, str]) -> list[str]:
    """Return lines with a column of names and one of values."""
    width = max(map(len, rows)) + 2
    return [f"{name:<{width}}{value}" for name, value in rows.items()]


def shorten(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def _draw(lines: Sequence[Sequence[str]], stream: TextIO, width: int) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    fixed = {*COLUMNS, "trial", "fold"} - {*WRAPPED}
    columns = [Column(name, no_wrap=name in fixed, min_width=None if name in fixed else 8) for name in lines[0]]
    gap = 2 if width >= 100 else 1
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for line in lines[1:]:
        table.add_row(*(Text(text, style=COLORS.get(text, ""), overflow="fold") for text in line))
    Console(file=stream).print(table)


def format_number(value: Any) -> str:
    """Format a metric; empty if it is not a number."""
    if not isinstance(value, int | float):
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """Return `1 trial`, or `2 trials`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_duration(seconds: float | None, units: int = 2) -> str:
    """Format a duration in its largest units: `45 s`, `3 min 20 s`, `2 d 4 h`; empty if it is unknown or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    rest, parts = max(0, round(seconds)), []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        parts.append((count, unit))
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + units] if count) or "0 s"
