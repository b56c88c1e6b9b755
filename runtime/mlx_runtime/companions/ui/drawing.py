"""The experiment drawn: its structure as a diagram of mermaid, as Markdown with tables, or as an SVG picture.

All names come from code, so each of them is escaped.
"""

import asyncio
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.workbench import NoAnswerError, call
from mlx_runtime.errors import MlxError, printable

DEPTH = 2
"""Levels of modules below the models that are drawn by default."""

BOXES = {"datasets": '[("{}")]', "losses": '{{{{"{}"}}}}', "optimizers": '(["{}"])'}
"""Boxes of mermaid."""

COLUMNS = ("module", "class", "output", "parameters", "conf.yaml, notes")

PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 {width} {height}" style="background: white"
font-family="monospace" font-size="12">
<style>rect {{ fill: #eef2f7; stroke: #9aa5b1 }} .conf {{ fill: #fff4d6; stroke: #c98a00 }}
path {{ fill: none; stroke: #5b6570 }}</style>
<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L8,4 L0,8 z" style="fill: #5b6570"/></marker>
{drawn}
</svg>
"""

Row = dict[str, Any]


def structure_of(project: Path, overrides: Sequence[str] = (), timeout_s: float = 60.0) -> Any:
    """Return the structure of the experiment in a folder, see `structure.describe`, from another process.

    If its loop does not end in time, or ends its process, there are no shapes.

    Raises:
        MlxError: the models cannot be built. One line.
    """
    describe = "mlx_runtime.companions.ui.structure:describe"
    try:
        return call(project, describe, list(overrides), timeout_s=timeout_s)
    except NoAnswerError as error:
        return call(project, describe, list(overrides), str(error), timeout_s=timeout_s)


def to_mermaid(structure: Row, depth: int = DEPTH) -> str:
    """Return a flowchart of mermaid, with `depth` levels of modules below each model."""
    rows = [row for group in (*BOXES, "models") for row, _ in _levels(structure[group], depth)]
    ids = {row["key"]: f"n{number}" for number, row in enumerate(rows)}
    lines = [
        "flowchart TD",
        "classDef conf stroke-width:3px",
        *(ids[row["key"]] + box.format(_label(row)) for group, box in BOXES.items() for row in structure[group]),
        *(line for model in structure["models"] for line in _boxes(model, ids)),
        *(f"{ids[start]} --> {ids[end]}" for start, end in _edges(structure, ids)),
    ]
    return "\n".join(lines) + "\n"


def to_markdown(structure: Row, depth: int = DEPTH) -> str:
    """Return a page of Markdown: the diagram, and a table of the modules."""
    return f"```mermaid\n{to_mermaid(structure, depth)}```\n\n{to_tables(structure, depth)}"


def to_tables(structure: Row, depth: int = DEPTH) -> str:
    """Return a table of the modules, in HTML, so that nothing in it is read as Markdown."""
    rows = [_cells(row, level) for row, level in _levels(structure["models"], depth)]
    lines = [f"<tr><td>{'</td><td>'.join(map(escape, cells))}</td></tr>\n" for cells in (COLUMNS, *rows)]
    return f"<table>\n{''.join(lines)}</table>\n"


def to_svg(structure: Row, depth: int = DEPTH) -> str:
    """Return a picture: the datasets, the models with `depth` levels of modules, the losses and the optimizers."""
    columns = [[*_levels(structure[group], depth)] for group in ("datasets", "models", "losses", "optimizers")]
    places = {
        row["key"]: (270 * x + 12 * min(level, 5), 70 * y, row)
        for x, column in enumerate(columns)
        for y, (row, level) in enumerate(column)
    }
    drawn = []
    for start, end in _edges(structure, places):
        (x, y, _), (to_x, to_y, _) = places[start], places[end]
        out, end_x = x + 200, to_x if to_x > x + 200 else to_x + 200  # from its right side to the nearer one
        drawn.append(
            f'<path marker-end="url(#tip)" d="M{out},{y + 30} C{out + 40},{y + 30} '
            f'{end_x + 40 * (1 if end_x > to_x else -1)},{to_y + 20} {end_x},{to_y + 20}"/>'
        )
    for x, y, row in places.values():
        kind = ' class="conf"' if row["node"] else ""
        drawn.append(f'<rect{kind} x="{x}" y="{y}" width="200" height="56" rx="4"/>')
        for line, text in enumerate(_facts(row)):
            cut = f'<svg x="{x}" y="{y + 17 * line}" width="196" height="20">'
            drawn.append(f'{cut}<text x="8" y="15">{escape(text)}</text></svg>')
    return PICTURE.format(width=1080, height=70 * max(map(len, columns)) + 20, drawn="\n".join(drawn))


def drawing_tab(project: Path) -> Any:
    """Return the tab of a page that shows the experiment of a project. Its models are built when it is first shown."""
    import marimo as mo

    async def shown() -> Any:
        try:
            structure = await asyncio.to_thread(structure_of, project)
        except MlxError as error:
            return mo.plain_text(str(error))
        return mo.vstack([mo.mermaid(to_mermaid(structure)), mo.Html(to_tables(structure))])

    return mo.lazy(shown, show_loading_indicator=True)


def _levels(rows: Sequence[Row], depth: int, level: int = 0) -> Iterator[tuple[Row, int]]:
    """Yield the rows that are drawn, each with the number of those that it is in."""
    for row in rows:
        yield row, level
        if level < depth:
            yield from _levels(row["modules"], depth, level + 1)


def _edges(structure: Row, shown: Container[str]) -> list[tuple[str, str]]:
    """Return the edges between rows that are drawn, except for those between a module and one in it.

    The edges of other modules are those of the row that they are in.
    """

    def drawn(key: str) -> str:
        while key and key not in shown:
            key = key.rpartition(".")[0]
        return key

    pairs = dict.fromkeys((drawn(start), drawn(end)) for start, end in structure["edges"])
    return [(a, b) for a, b in pairs if a and b and not f"{a}.".startswith(f"{b}.") and not f"{b}.".startswith(f"{a}.")]


def _boxes(row: Row, ids: Mapping[str, str]) -> list[str]:
    """Return the lines of a module in mermaid."""
    inner = [line for item in row["modules"] if item["key"] in ids for line in _boxes(item, ids)]
    own = f'{ids[row["key"]]}["{_label(row, " " if inner else "<br/>")}"]'  # the title of a subgraph has one line
    lines = [f"subgraph {own}", *inner, "end"] if inner else [own]
    return [*lines, *[f"class {ids[row['key']]} conf"] * bool(row["node"])]


def _label(row: Row, line: str = "<br/>") -> str:
    return line.join(re.sub(r"[^\w ,()]", lambda found: f"#{ord(found[0])};", fact) for fact in _facts(row) if fact)


def _facts(row: Row) -> tuple[str, str, str]:
    """Return the lines in a box."""
    name, kind, shape, parameters, _ = _cells(row)
    return f"{name}: {kind}", shape or printable(row["note"], one_line=True), parameters and f"{parameters} parameters"


def _cells(row: Row, level: int = 0) -> list[str]:
    notes = "; ".join(filter(None, (row["node"], row["note"])))
    count = f"{row['parameters']:,}" if row["parameters"] else ""
    cells = ("· " * level + row["name"], row["class"], row["shape"], count, notes)
    return [printable(cell, one_line=True) for cell in cells]
