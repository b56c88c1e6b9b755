"""Decide which checkpoints of a run to keep."""

import math
from collections.abc import Mapping, Sequence

from mlx_runtime.runs.checkpoint_index import Checkpoint

UNFINISHED = 2
"""How many checkpoints of an unfinished epoch are kept."""


def score(metrics: Mapping[str, float], monitor: str | None, mode: str) -> float:
    """Return how good a checkpoint is, higher is better; minus infinity if it has no such metric."""
    value = metrics.get(monitor or "", math.nan)
    return -math.inf if math.isnan(value) else value if mode == "max" else -value


def superfluous(saved: Sequence[Checkpoint], keep: int, monitor: str | None, mode: str) -> list[Checkpoint]:
    """Return the checkpoints to remove: all but the best, the latest, and the newest of an unfinished epoch.

    Args:
        saved: All checkpoints, oldest first.
        keep: How many of the best to keep.
        monitor: Metric they are judged by; without one the newest are the best.
        mode: `max` or `min`.
    """
    finished = [item for item in saved if item.finished]
    ranked = sorted(finished, key=lambda item: (score(item.metrics, monitor, mode), item.order), reverse=True)
    last = finished[-1].order if finished else (-1, True, 0)
    newest = [item for item in saved if item.order > last][-UNFINISHED:]
    kept = {item.name for item in [*ranked[:keep], *finished[-1:], *newest]}
    return [item for item in saved if item.name not in kept]
