"""Alternating measurements, so that other load on the machine affects all contenders alike."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from commands import RunError

Found = TypeVar("Found")

ATTEMPTS = 3
"""Attempts per measurement: processes under torchrun occasionally abort on exit, after their work is done."""

failures: Counter[str] = Counter()
"""Number of failed and repeated runs per contender, for the page."""


def alternating(
    contenders: Sequence[str], only: Collection[str], rounds: int, measure: Callable[[str], Found]
) -> dict[str, list[Found]]:
    """Measure A B C, A B C, … and return the measurements of each contender.

    Args:
        contenders: names; the first is the baseline of the ratios.
        only: contenders to measure besides the first; all if empty.
        rounds: measurements per contender.
        measure: called with the name of a contender.
    """
    chosen = [name for name in contenders if not only or name in only or name == contenders[0]]
    found: dict[str, list[Found]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name in chosen:
            started = time.monotonic()
            found[name].append(repeated(measure, name))
            took = time.monotonic() - started
            print(f"round {number + 1}/{rounds}  {name:<18}{took:5.1f} s  {_short(found[name][-1])}", flush=True)
    return found


def repeated(measure: Callable[[str], Found], name: str) -> Found:
    """Measure a contender, again if it fails."""
    for _ in range(ATTEMPTS - 1):
        try:
            return measure(name)
        except RunError as error:
            failures[name] += 1
            print(f"{error}\n{name} is run again", flush=True)
    return measure(name)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def compared(
    own: Sequence[float], base: Sequence[float], *, at_most: float = math.inf, at_least: float = 0.0, digits: int = 2
) -> str:
    """Return the ratio of two medians, with the least and the greatest of all rounds: `1.45x (1.41-1.52)`.

    A ratio that misses its goal, `at_most` or `at_least`, is marked.
    """
    ratio = median(own) / median(base)
    each = [one / other for one, other in zip(own, base, strict=True)]
    spread = f" ({min(each):.{digits}f}-{max(each):.{digits}f})" if len(each) > 1 else ""
    missed = "" if at_least <= round(ratio, digits) <= at_most else " **missed**"
    return f"{ratio:.{digits}f}x{spread}{missed}"


def _short(found: object) -> str:
    text = str(found)
    return text if len(text) < 100 else ""
