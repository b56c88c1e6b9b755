"""Detection of deadlocked workers."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_runtime.events import WorkerPosition
from mlx_runtime.workers.deadlocks import verdict

pytestmark = pytest.mark.pure


def answer(rank: int = 0, **fields: Any) -> WorkerPosition:
    return replace(WorkerPosition(rank, 0, "train", 5, "src/a.py:3 in f", seconds=9.0), **fields)


def test_one_that_waits_is_a_hang() -> None:
    text = verdict({0: answer(waits_in="all_reduce"), 1: answer(1, stage=None, at="")}, 2)
    assert text == (
        "rank 0 has been waiting in all_reduce for 9 s: epoch 1, train step 5, src/a.py:3 in f\n"
        "  rank 1 has been busy for 9 s: epoch 1, before the first pass"
    )


def test_one_that_is_silent_is_told() -> None:
    text = verdict({0: answer()}, 2)
    assert text is not None
    assert text.endswith("rank 1 does not answer: its process is stopped, or its node is unreachable")


def test_on_gpus_ranks_that_stand_apart_hang() -> None:
    assert verdict({0: answer(gpu=True), 1: answer(1, gpu=True)}, 2) is None
    assert verdict({0: answer(gpu=True), 1: answer(1, gpu=True, step=6)}, 2) is not None
