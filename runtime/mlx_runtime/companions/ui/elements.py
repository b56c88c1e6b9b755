"""Elements of pages. Texts of runs are not trusted: marimo would render markup, Markdown and addresses in them."""

import base64
import functools
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import marimo
import pandas

from mlx_runtime.errors import printable
from mlx_runtime.storage.redaction import redact

ADDRESS = re.compile(
    r"(?<=:)(?=//)|(?<=\bdata:)|(?<=\bjavascript:)|(?<=\bwww)(?=\.)|(?<=\])(?=[(\[])|(?<=\w)(?=@)", re.IGNORECASE
)
"""Where an invisible space keeps an address from becoming a link or an image."""

CELL = 200
"""Maximum length of a text in a table; names are not cut, because they must differ."""

PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
"""Pictures that a page shows, by their first bytes. Others, like SVG, could contain scripts or addresses."""


@functools.lru_cache(100_000)
def plain(value: str) -> str:
    """Return a text that is shown as it is in tables and lists: in one line, without secrets, and without addresses."""
    return ADDRESS.sub("\u200b", printable(redact(value), one_line=True))


def table(rows: pandas.DataFrame, **settings: Any) -> Any:
    """Return a table with search, filters and sorting, whose texts are plain."""
    shown = rows.rename(columns={name: plain(str(name)) for name in rows})
    for name, values in shown.items():
        if values.dtype == object or values.dtype == "str":
            shown[name] = [value if isinstance(value, bool | int | float) else _cell(value) for value in values]
    numbers = {name: _number for name, values in shown.items() if values.dtype == "float64"}
    settings = {
        "selection": None,
        "format_mapping": numbers,
        "show_download": False,
        "show_data_types": False,
        "max_columns": None,
    } | settings
    return marimo.ui.table(shown, show_column_summaries=False, **settings)


def _number(value: Any) -> str:
    """Return a number with six digits, or nothing for a missing one."""
    if not isinstance(value, float) or math.isnan(value):
        return ""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _cell(value: object) -> str | None:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return None if value is None else plain(text if len(text) <= CELL else f"{text[: CELL - 1]}…")


def text(content: str | None) -> Any:
    """Return a block of text, like a log."""
    safe = html.escape(printable(redact(content or "")))
    return marimo.Html(f'<pre style="max-height: 30rem; overflow: auto; white-space: pre-wrap">{safe}</pre>')


def problems(lines: Iterable[str]) -> Any:
    """Return a box with what cannot be read; nothing if there are no lines."""
    items = [html.escape(plain(line)) for line in lines]
    more = [f"… and {len(items) - 20:,} more"] if len(items) > 20 else []
    return marimo.callout(marimo.Html("<br>".join(items[:20] + more)), kind="warn") if items else marimo.Html("")


def picture(content: bytes, title: str) -> Any:
    """Return a picture below its title, or a line about one that is not shown."""
    kind = next((kind for start, kind in PICTURES.items() if content.startswith(start)), None)
    caption = html.escape(plain(title))
    if kind is None:
        return marimo.Html(f"<p>{caption}: this picture is neither PNG, JPEG nor GIF</p>")
    data = base64.b64encode(content).decode()
    return marimo.Html(f'<figure><img src="data:{kind};base64,{data}"><figcaption>{caption}</figcaption></figure>')


def state(value: Any = None) -> Any:
    """Return a state of marimo with a method `settle`: it sets a value, and cells run again only if that differs."""
    get, change = marimo.state(value)

    def settle(new: Any) -> None:
        last = get()
        if type(new) is not type(last) or not (new.equals(last) if isinstance(new, pandas.DataFrame) else new == last):
            change(new)

    get.settle = settle  # type: ignore[attr-defined]
    return get


def remember(name: str, value: Any) -> None:
    """Keep a choice in the URL of the page."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    marimo.query_params().set(name, "\n".join(map(str, items)))


def remembered(name: str) -> list[str]:
    """Return a choice that is in the URL. marimo itself reads only the last of several values."""
    return [item for item in str(marimo.query_params().get(name, "")).split("\n") if item]


def choice(
    kind: str,
    name: str,
    options: Sequence[str] | Mapping[str, str],
    default: str | None = None,
    **settings: Any,
) -> Any:
    """Return a `radio`, `dropdown` or `multiselect` of `marimo.ui`, whose value is kept in the URL.

    Options, or their labels, may be texts of runs. One of several is chosen by default: `default`, or the first.
    """
    labels = options if isinstance(options, Mapping) else {option: option for option in options}
    shown = {plain(label): option for label, option in labels.items()}
    values = [label for label, option in shown.items() if option in remembered(name)]
    one = next(iter([*values, *(label for label, option in shown.items() if option == default), *shown]), None)
    settings |= {"options": shown, "value": values if kind == "multiselect" else one}
    return getattr(marimo.ui, kind)(**{"label": name} | settings, on_change=functools.partial(remember, name))
