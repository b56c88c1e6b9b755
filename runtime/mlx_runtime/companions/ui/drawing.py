"""The experiment drawn: its structure as a diagram of mermaid, as Markdown with tables, or as an SVG picture.

All names come from code, so each of them is escaped.
"""

import asyncio
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.workbench import Workbench
from mlx_runtime.errors import MlxError, printable

READABLE, DEEPEST = 60, 20
"""Modules of a model that are drawn unless a depth is given, and the maximum depth then."""

BOXES = {"datasets": '[("{}")]', "losses": '{{{{"{}"}}}}', "optimizers": '(["{}"])'}
"""Boxes of mermaid."""

COLUMNS = {
    "module": (0, 240),
    "class": (240, 210),
    "output": (450, 310),
    "parameters": (760, 110),
    "buffers": (870, 90),
    "conf.yaml, notes": (960, 440),
}
"""Of the tables of modules, with their positions and widths in pictures."""

PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 1420 {height}" style="background: white"
font-family="monospace" font-size="12">
<style>rect {{ fill: #eef2f7; stroke: #9aa5b1 }} .conf {{ fill: #fff4d6; stroke: #c98a00 }}
path {{ fill: none; stroke: #5b6570 }}</style>
<marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L8,4 L0,8 z" style="fill: #5b6570"/></marker>
{drawn}
</svg>
"""

Row = dict[str, Any]


def structure_of(project: Path, overrides: Sequence[str] = (), timeout_s: float = 60.0) -> Row:
    """Return the structure of the experiment in a folder, see `structure.describe`, from another process.

    If its loop does not end in time, or ends its process, there are no shapes.

    Raises:
        MlxError: the models cannot be built. One line.
    """
    bench, describe = Workbench(project), "mlx_runtime.companions.ui.structure:describe"
    try:
        found: Row = bench.call(describe, list(overrides), timeout_s=timeout_s)
    except MlxError as error:
        found = bench.call(describe, list(overrides), str(error), timeout_s=timeout_s)
    return found


def to_mermaid(structure: Row, depth: int | None = None) -> str:
    """Return a flowchart of mermaid. Models have at most `depth` levels, by default as many as are readable."""
    models = [_shown(model, depth) for model in structure["models"]]
    rows = [row for group in BOXES for row in structure[group]] + [row for model in models for row, _ in _levels(model)]
    ids = {row["key"]: f"n{number}" for number, row in enumerate(rows)}
    lines = ["flowchart TD", "classDef conf stroke-width:3px"]
    for group, box in BOXES.items():
        lines += [ids[row["key"]] + box.format(_label(row)) for row in structure[group]]
    for model in models:
        lines += _boxes(model, ids)
    shown = {key: row["key"] for row in rows for key in row.get("covers", [row["key"]])}
    lines += [f"{ids[start]} --> {ids[end]}" for start, end in _edges(structure, shown)]
    return "\n".join(lines) + "\n"


def to_markdown(structure: Row, depth: int | None = None) -> str:
    """Return a page of Markdown: the diagram, and a table of the modules of each model."""
    diagram = to_mermaid(structure, depth)
    return f"# {_code(structure['name'])}\n\n```mermaid\n{diagram}```\n{to_tables(structure, depth)}"


def to_tables(structure: Row, depth: int | None = None) -> str:
    """Return a table in Markdown of the modules of each model."""
    lines = []
    for model in structure["models"]:
        lines += ["", f"| {' | '.join(COLUMNS)} |", "|---|---|---|--:|--:|---|"]
        for row, level in _levels(_shown(model, depth)):
            lines.append(f"| {' | '.join(map(_code, _cells(row, level)))} |")
    return "\n".join(lines) + "\n"


def to_svg(structure: Row, depth: int | None = None) -> str:
    """Return a picture: the wiring in four columns, and the modules of each model below."""
    columns = [structure[group] for group in ("datasets", "models", "losses", "optimizers")]
    places = [
        (260 * x, 60 * y + 30 * (x == 1), row) for x, column in enumerate(columns) for y, row in enumerate(column)
    ]
    at = {row["key"]: (x + 100, y + 20) for x, y, row in places}
    drawn = []
    for start, end in _edges(structure, {key: key for key in at}):
        (x, y), (to_x, to_y) = at[start], at[end]
        drawn.append(f'<path marker-mid="url(#tip)" d="M{x},{y} L{(x + to_x) / 2},{(y + to_y) / 2} L{to_x},{to_y}"/>')
    for x, y, row in places:
        drawn += [_box(x, y, 200, 40, row["node"]), *(_line(x, y + 18 * n, 200, _cells(row)[n]) for n in (0, 1))]
    top = 60 * max(map(len, columns)) + 60
    for model in structure["models"]:
        for row, level in [(None, 0), *_levels(_shown(model, depth))]:
            drawn += [_box(0, top, 1400, 20, row["node"])] if row else []
            texts = zip(COLUMNS.values(), _cells(row, level) if row else COLUMNS, strict=True)
            drawn += [_line(x, top, width, text) for (x, width), text in texts]
            top += 22
        top += 30
    return PICTURE.format(height=top, drawn="\n".join(drawn))


def drawing_tab(project: Path) -> Any:
    """Return the tab of a page that shows the experiment of a project. The page stays usable while it is built."""
    import marimo as mo

    building = ThreadPoolExecutor(1).submit(structure_of, project)

    async def shown() -> Any:
        await asyncio.sleep(0 if building.done() else 0.5)
        if not building.done():  # the page answers others before it asks again
            return mo.lazy(shown, show_loading_indicator=True)
        if error := building.exception():
            return mo.plain_text(str(error))
        structure = building.result()
        return mo.vstack([mo.mermaid(to_mermaid(structure)), mo.md(to_tables(structure))])

    return mo.lazy(shown, show_loading_indicator=True)


def _shown(model: Row, depth: int | None) -> Row:
    """Return a model with the modules to draw."""
    for level in range(DEEPEST if depth is None else depth, -1, -1):
        cut = _cut([model], level)
        if depth is not None or len([*_levels(cut)]) <= READABLE:
            break
    return cut


def _cut(equal: Sequence[Row], depth: int) -> Row:
    """Return equal neighbours as one row, which `covers` their keys, with at most `depth` levels of modules in it."""
    names = [row["name"] for row in equal]
    groups = itertools.groupby(equal[0]["modules"] if depth else (), _kind)
    return equal[0] | {
        "name": names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}",
        "covers": [row["key"] for row in equal],
        "modules": [_cut([*group], depth - 1) for _, group in groups],
    }


def _kind(row: Row) -> Any:
    """Return what neighbours that are drawn as one have in common."""
    same = [row[fact] for fact in ("class", "shape", "parameters", "buffers", "note")]
    return *same, bool(row["node"]), [(inner["name"], _kind(inner)) for inner in row["modules"]]


def _levels(row: Row, level: int = 0) -> Iterator[tuple[Row, int]]:
    yield row, level
    for inner in row["modules"]:
        yield from _levels(inner, level + 1)


def _edges(structure: Row, shown: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the edges between rows that are shown, except for those between a module and one in it."""

    def drawn(key: str) -> str:
        return shown[
            max((part for part in itertools.accumulate(key.split("."), "{}.{}".format) if part in shown), key=len)
        ]

    pairs = dict.fromkeys((f"{drawn(start)}.", f"{drawn(end)}.") for start, end in structure["edges"])
    return [(a[:-1], b[:-1]) for a, b in pairs if not a.startswith(b) and not b.startswith(a)]


def _boxes(row: Row, ids: Mapping[str, str]) -> list[str]:
    """Return the lines of a module in mermaid. Modules without known connections are below each other."""
    own, inner = f'{ids[row["key"]]}["{_label(row)}"]', [line for item in row["modules"] for line in _boxes(item, ids)]
    if not row["shape"]:
        inner += [f"{ids[above['key']]} ~~~ {ids[below['key']]}" for above, below in itertools.pairwise(row["modules"])]
    lines = [f"subgraph {own}", *inner, "end"] if inner else [own]
    return [*lines, *[f"class {ids[row['key']]} conf"] * bool(row["node"])]


def _label(row: Row) -> str:
    name, kind, *facts = (re.sub(r"[^\w ,()]", lambda found: f"#{ord(found[0])};", cell) for cell in _cells(row))
    line = " " if row["modules"] else "<br/>"  # the title of a subgraph has one line
    return line.join([f"{name}#58; {kind}", *(fact for fact in facts[:2] if fact)])


def _cells(row: Row, level: int = 0) -> list[str]:
    times = f" (x{len(row['covers'])})" if len(row.get("covers", ())) > 1 else ""
    counts = [f"{row[kind]:,}" if row[kind] else "" for kind in ("parameters", "buffers")]
    notes = "; ".join(filter(None, (row["node"], row["note"])))
    cells = ("· " * level + row["name"], row["class"] + times, row["shape"], *counts, notes)
    return [printable(cell, one_line=True) for cell in cells]


def _code(text: str) -> str:
    """Return a code span, in which nothing is interpreted."""
    return f"`{printable(text, one_line=True).replace('`', chr(39)).replace('|', '¦')}`" if text else ""


def _box(x: int, y: int, width: int, height: int, node: str) -> str:
    kind = ' class="conf"' if node else ""
    return f'<rect{kind} x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'


def _line(x: int, y: int, width: int, text: str) -> str:
    """Return text that is cut off at a width."""
    return f'<svg x="{x}" y="{y}" width="{width - 4}" height="20"><text x="8" y="14">{escape(text)}</text></svg>'
