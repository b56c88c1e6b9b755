"""Leases: refreshed while their holder is alive, and expired afterwards."""

import datetime
import os
import re
import threading

import pytest

from mlx_runtime.storage import leases

pytestmark = pytest.mark.pure


def ago(seconds: float) -> str:
    return (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds)).isoformat()


def test_a_process_of_this_machine_is_known_to_live_or_not() -> None:
    mine = leases.lease() | {"heartbeat": ago(1_000)}
    assert leases.is_alive(mine)
    assert not leases.is_alive(mine | {"pid_started": "1"})
    assert leases.holder(mine).startswith(f"process {os.getpid()} on ")
    assert re.search(r", last heard from 10\d\d s ago$", leases.holder(mine))


@pytest.mark.parametrize(("age", "alive"), [(1, True), (leases.STALE_S + 1, False)])
def test_of_another_machine_the_heartbeat_counts(age: float, alive: bool) -> None:
    assert leases.is_alive(leases.lease() | {"boot": "elsewhere", "heartbeat": ago(age)}) is alive


def test_the_heart_beats_while_the_block_runs() -> None:
    beats, before = threading.Semaphore(0), {*threading.enumerate()}
    with leases.heartbeat(beats.release, 0.01):
        (thread,) = (item for item in {*threading.enumerate()} - before if item.name == "heartbeat")
        assert all(beats.acquire(timeout=60) for _ in range(3))
    assert not thread.is_alive()
