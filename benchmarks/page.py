"""docs/benchmarks.md, section by section."""

import os
import re
import subprocess
from collections.abc import Iterable

from commands import BIN, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def write(title: str, text: str, order: Iterable[str]) -> None:
    """Replace one section; the others stay. Sections stand in the given order of titles."""
    sections = re.split(r"^## (.*)\n", PAGE.read_text() if PAGE.exists() else "", flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True)) | {title: text}
    versions = subprocess.run([BIN / "pip", "freeze"], capture_output=True, text=True, check=True).stdout.splitlines()
    named = [line for line in versions if line.split("==")[0] in ("torch", "ray", "accelerate", "lightning")]
    head = f"""# Benchmarks

Written by `make bench`: ratios against peers in one run, on {os.cpu_count()} cores without a GPU ({", ".join(named)}).
Two DDP workers over gloo, one thread each, where nothing else is said.

"""
    body = "\n\n".join(f"## {name}\n\n{found[name].strip()}" for name in order if name in found)
    PAGE.write_text(head + body + "\n")


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    return "\n".join([row(titles), "|---" * len(titles) + "|", *map(row, rows)])
