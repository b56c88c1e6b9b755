"""Leases and marks: refreshed while their holder is alive, and expired afterwards."""

import datetime
import os
import re
import threading
import time
from pathlib import Path

import pytest

from mlx_runtime.storage import leases
from mlx_runtime.storage.files import storage_at

pytestmark = pytest.mark.pure


def ago(seconds: float) -> str:
    return (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds)).isoformat()


def test_a_process_of_this_machine_is_known_to_live_or_not() -> None:
    mine = leases.lease(heartbeat=ago(1_000))
    assert leases.is_alive(mine)
    assert not leases.is_alive(mine | {"pid_started": "1"})
    assert leases.holder(mine).startswith(f"process {os.getpid()} on ")
    assert re.search(r", last heard from 10\d\d s ago$", leases.holder(mine))


@pytest.mark.parametrize(("age", "alive"), [(1, True), (leases.STALE_S + 1, False)])
def test_of_another_machine_the_heartbeat_counts(age: float, alive: bool) -> None:
    assert leases.is_alive(leases.lease(boot="elsewhere", heartbeat=ago(age))) is alive


def test_the_heart_beats_while_the_block_runs() -> None:
    beats, before = threading.Semaphore(0), {*threading.enumerate()}
    with leases.heartbeat(beats.release, 0.01):
        (thread,) = (item for item in {*threading.enumerate()} - before if item.name == "heartbeat")
        assert all(beats.acquire(timeout=60) for _ in range(3))
    assert not thread.is_alive()


def test_a_mark_is_there_while_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MARK_S", 0.05)
    (tmp_path / "data").mkdir()
    storage = storage_at(str(tmp_path))
    with leases.mark(storage, "data"):
        (name,) = [name for name in storage.names("data") if name.startswith("used-")]  # others are refreshes
        path = tmp_path / "data" / name
        os.utime(path, (0, 0))
        until = time.monotonic() + 60
        while path.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
    assert storage.names("data") == []
    assert not leases.is_fresh(time.time() - 1)


def test_where_no_mark_can_be_written_the_block_runs_without(tmp_path: Path) -> None:
    with leases.mark(storage_at(str(tmp_path)), "missing"):
        assert list(tmp_path.iterdir()) == []
