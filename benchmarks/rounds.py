"""Contenders that take turns, so that what else the machine does meets all of them."""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

Found = TypeVar("Found")


def alternating(
    contenders: Sequence[str], only: Collection[str], rounds: int, measure: Callable[[str], Found]
) -> dict[str, list[Found]]:
    """Measure A B C, A B C, … and return what was found by contender.

    Args:
        contenders: names; the first is the base of the ratios.
        only: those to measure beside the first; all when empty.
        rounds: how often.
        measure: called with a name.
    """
    chosen = [name for name in contenders if not only or name in only or name == contenders[0]]
    found: dict[str, list[Found]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name in chosen:
            started = time.monotonic()
            found[name].append(measure(name))
            took = time.monotonic() - started
            print(f"round {number + 1}/{rounds}  {name:<18}{took:5.1f} s  {_short(found[name][-1])}", flush=True)
    return found


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _short(found: object) -> str:
    text = str(found)
    return text if len(text) < 100 else ""
