"""Curves of a run for its page: read from metrics.jsonl, thinned, and grouped into charts."""

import contextlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_runtime.runs.records import FACTS
from mlx_runtime.storage.documents import COUNT, NUMBER, from_json

MAX_POINTS = 2_000
"""Points per curve; each section of a longer one is drawn by its minimum and maximum."""

GROUPS = ("lr", "time")
"""Prefixes, as in `lr/adam`, whose curves share a chart. Other charts have one per metric: `train/loss`, `val/loss`."""

LAST_CHARTS = (*GROUPS, "samples_per_s")

Point = tuple[int, float | None, int]
"""Step, value (None for NaN), epoch counted from 1."""


def read_curves(lines: str) -> dict[str, list[Point]]:
    """Read the curve of each metric from metrics.jsonl, skipping incomplete lines."""
    found: dict[str, list[Point]] = {}
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            values = from_json(line.encode(), {"step": COUNT, "epoch": COUNT}, needs=("step", "epoch"))
            for name, value in values.items():
                if name not in ("step", "epoch", *FACTS) and NUMBER.or_null().fits(value):
                    found.setdefault(name, []).append((values["step"], value, values["epoch"] + 1))
    return found


def group_charts(curves: Mapping[str, Sequence[Point]], monitor: str | None) -> list[dict[str, Any]]:
    """Group curves into charts: first the monitored metric, last learning rates and speed."""
    charts: dict[str, dict[str, Any]] = {}
    for name, points in curves.items():
        group, _, short = name.partition("/")
        title, label = (group, short) if group in GROUPS or not short else (short, group)
        chart = charts.setdefault(title, {"title": title, "order": 2 if title in LAST_CHARTS else 1, "curves": []})
        chart["order"] = 0 if name == monitor else chart["order"]
        steps, values, epochs = zip(*thin(points), strict=True)
        # Plotly interprets tags and %{...} in names as markup.
        escaped = html.escape(label or title).replace("%", "&#37;")
        chart["curves"].append({"name": escaped, "x": steps, "y": values, "epochs": epochs})
    return sorted(charts.values(), key=lambda chart: chart["order"])


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """Reduce a curve to at most `MAX_POINTS` that look the same: peaks stay."""
    if len(points) <= MAX_POINTS:
        return points
    kept: dict[int, Point] = {0: points[0], len(points) - 1: points[-1]}
    sections = MAX_POINTS // 2 - 1
    for section in range(sections):
        first, end = (len(points) * edge // sections for edge in (section, section + 1))
        known = [(value, index) for index in range(first, end) if (value := points[index][1]) is not None]
        for _, index in (min(known), max(known)) if known else [(None, first)]:
            kept[index] = points[index]
    return [kept[index] for index in sorted(kept)]
