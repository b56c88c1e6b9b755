"""Detection of deadlocked workers."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_runtime.events import Event, WorkerPosition, WorkerStalled
from mlx_runtime.workers import deadlocks
from mlx_runtime.workers.deadlocks import Watchdog, verdict

pytestmark = pytest.mark.pure


def answer(rank: int = 0, **fields: Any) -> WorkerPosition:
    return replace(WorkerPosition(rank, 0, "train", 5, "src/a.py:3 in f", seconds=9.0), **fields)


def test_workers_that_are_all_at_work_do_not_hang() -> None:
    assert verdict({0: answer(), 1: answer(1, step=6)}, 2) is None


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


def test_a_watchdog_reports_again_and_again_but_not_while_there_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks, told = [1000.0], threading.Semaphore(0), list[Event]()

    def monotonic() -> float:
        if threading.current_thread().name == "watchdog":
            looks.release()
        return clock[0]

    monkeypatch.setattr(deadlocks, "time", SimpleNamespace(monotonic=monotonic))
    before = set(threading.enumerate())
    watch = Watchdog(0.02, told.append, lambda: WorkerPosition(0, step=3), Path(__file__).parent)

    def later(seconds: float) -> int:
        """Return the number of reports after that time, of which it has noticed the end."""
        clock[0] += seconds
        while looks.acquire(blocking=False):
            pass
        for _ in range(4):  # the first may have begun before, and a report takes two
            assert looks.acquire(timeout=60)
        return len(told)

    for _ in range(3):
        assert later(0.015) == 0
        watch.beat()
    assert [later(0.03), later(0.015), later(0.015), later(0.03)] == [1, 1, 2, 3]
    watch.close()
    assert isinstance(told[0], WorkerStalled)
    position = watch.position()
    assert position.step == 3
    assert position.at.startswith("test_deadlocks.py:")
    assert position.at.endswith(" in test_a_watchdog_reports_again_and_again_but_not_while_there_are_steps")
    assert position.waits_in is None
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_user_code_that_waits_in_another_thread_is_found(tmp_path: Path) -> None:
    """The thread that is watched may wait for it, which is no collective."""
    folder = tmp_path / "mlx_runtime" / "distributed"
    waiting, wanted = threading.Event(), threading.Event()
    scope: dict[str, Any] = {"waiting": waiting, "wanted": wanted}
    exec(compile("def agree():\n    waiting.set()\n    wanted.wait()", str(folder / "collectives.py"), "exec"), scope)
    exec(compile("def report():\n    agree()", str(tmp_path / "src" / "training.py"), "exec"), scope)
    watch = Watchdog(60.0, lambda event: None, lambda: WorkerPosition(0), tmp_path / "src")
    thread = threading.Thread(target=scope["report"])
    thread.start()
    waiting.wait()
    position = watch.position()
    wanted.set()
    thread.join()
    watch.close()
    assert (position.waits_in, position.at) == ("agree of mlx_runtime", "training.py:2 in report")


def test_one_that_took_a_step_just_now_is_at_work() -> None:
    assert verdict({0: answer(waits_in="all_reduce", seconds=0.5), 1: answer(1)}, 2, busy_s=5) is None


def test_on_gpus_ranks_that_stand_apart_hang() -> None:
    assert verdict({0: answer(gpu=True), 1: answer(1, gpu=True)}, 2) is None
    assert verdict({0: answer(gpu=True), 1: answer(1, gpu=True, step=6)}, 2) is not None


def test_one_that_is_not_ready_yet_is_no_hang() -> None:
    assert verdict({0: answer(waits_in="all_reduce"), 1: WorkerPosition(1)}, 2, busy_s=5) is None
