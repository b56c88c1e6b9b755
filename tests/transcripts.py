"""Transcripts in the guides: what commands print must be what the guide shows, but for numbers that vary."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
WRITE = "MLX_WRITE_TRANSCRIPTS"
"""Environment variable: write what commands print into the guides instead."""

DURATION = r"\d+ h(?: \d+ min)?|\d+ min(?: \d+ s)?|\d+(?:\.\d+)? s\b"
VARIES = rf"{DURATION}|\d+\.\d+|\d+(?= (?:s|min|h|ms|MB/s)\b)|(?<=job )\d+|\d+(?=/\d)"


def check_transcript(guide: str, name: str, lines: list[str], names: Mapping[str, str]) -> None:
    """Compare lines with the block of a guide below `<!-- transcript: NAME -->`.

    Args:
        guide: file name of the guide.
        name: name of the transcript.
        lines: commands, after `$ `, and what they have printed.
        names: paths, addresses and the like that the guide calls otherwise, with their names there.
    """
    file = GUIDES / guide
    head, mark, rest = file.read_text().partition(f"<!-- transcript: {name} -->\n")
    assert mark, f"{guide} has no transcript {name}"
    fence, block, rest = re.fullmatch(r"(```\w+\n)(.*?\n)(```\n.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    for real, shown in names.items():
        text = text.replace(real, shown)
    if WRITE in os.environ:
        file.write_text(f"{head}{mark}{fence}{text}{rest}")
    else:
        assert _constant(text) == _constant(block), f"{guide} is out of date; {WRITE}=1 updates it"


def _constant(text: str) -> list[str]:
    """Return lines without what varies, and without the widths of columns."""
    return [re.sub(r" {2,}", "  ", re.sub(VARIES, "#", re.sub(r"(job) +", r"\1 ", line))) for line in text.splitlines()]
