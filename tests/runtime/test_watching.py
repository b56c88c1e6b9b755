"""Who waits for whom."""

import threading
import time
from pathlib import Path

import pytest

from mlx_runtime.progress import NOWHERE
from mlx_runtime.watching import Watch, verdict

pytestmark = pytest.mark.pure


def answer(**fields: object) -> dict:
    return {
        "epoch": 0,
        "stage": "train",
        "step": 5,
        "at": "src/a.py:3 in f",
        "waits_in": None,
        "seconds": 9.0,
        "gpu": False,
    } | fields


def test_workers_that_are_all_at_work_do_not_hang() -> None:
    assert verdict({0: answer(), 1: answer(step=6)}, 2) is None


def test_one_that_waits_is_a_hang() -> None:
    text = verdict({0: answer(waits_in="all_reduce"), 1: answer(stage=None, at="")}, 2)
    assert text == (
        "rank 0 waits for the others in all_reduce since 9 s: epoch 1, train step 5, src/a.py:3 in f\n"
        "  rank 1 is at work since 9 s: epoch 1, before the first pass"
    )


def test_one_that_is_silent_is_told() -> None:
    text = verdict({0: answer()}, 2)
    assert text is not None
    assert text.endswith("rank 1 does not answer: its process is stopped, or its node is cut off")


def test_a_watch_tells_again_and_again_and_is_quiet_while_there_are_steps() -> None:
    told: list[dict] = []
    before = set(threading.enumerate())
    watch = Watch(0.2, told.append, lambda: {"step": 3}, Path(__file__).parent)
    for _ in range(8):
        time.sleep(0.05)
        watch.beat()
    assert told == []
    time.sleep(0.7)
    watch.close()
    assert 2 <= len(told) <= 4
    assert told[0]["step"] == 3
    assert told[0]["at"].startswith("test_watching.py:")
    assert told[0]["at"].endswith(" in test_a_watch_tells_again_and_again_and_is_quiet_while_there_are_steps")
    assert told[0]["waits_in"] is None
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_one_that_took_a_step_just_now_is_at_work() -> None:
    assert verdict({0: answer(waits_in="all_reduce", seconds=0.5), 1: answer()}, 2, least_s=5) is None


def test_on_gpus_ranks_that_stand_apart_hang() -> None:
    assert verdict({0: answer(gpu=True), 1: answer(gpu=True)}, 2) is None
    assert verdict({0: answer(gpu=True), 1: answer(gpu=True, step=6)}, 2) is not None


def test_one_that_is_not_ready_yet_is_no_hang() -> None:
    assert verdict({0: answer(waits_in="all_reduce"), 1: NOWHERE}, 2, least_s=5) is None
