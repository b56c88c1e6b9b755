"""Leases: the process that holds a run or a folder, in a record that it refreshes, and whether it is alive."""

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.storage.documents import now

HEARTBEAT_S = 10
"""Interval at which a holder refreshes its record."""

STALE_S = 60
"""Age at which the record of a process on another machine has expired."""


def this_process() -> dict[str, Any]:
    """Return fields that identify this process among those of all machines."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "pid_started": start_time_of(pid)}


def lease() -> dict[str, Any]:
    """Return a record of this process as a holder, with the current time."""
    return this_process() | {"status": "RUNNING", "heartbeat": now()}


def is_alive(record: Mapping[str, Any], stale_s: float = STALE_S) -> bool:
    """Return True if the process that wrote a record is alive: here by its process id, elsewhere by its heartbeat."""
    boot = _boot()
    if boot is not None and record.get("boot") == boot:
        return start_time_of(record.get("pid", 0)) == record.get("pid_started")
    return age_s(record) < stale_s


def holder(record: Mapping[str, Any]) -> str:
    """Describe the holder of a lease in error messages: `process 123 on host, last heard from 5 s ago`."""
    seconds = max(0, age_s(record))
    return f"process {record.get('pid')} on {record.get('host')}, last heard from {seconds:.0f} s ago"


def age_s(record: Mapping[str, Any]) -> float:
    """Return the seconds since the last heartbeat."""
    then = datetime.datetime.fromisoformat(record["heartbeat"])
    return (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()


@contextlib.contextmanager
def heartbeat(beat: Callable[[], None], every_s: float | None = None) -> Iterator[None]:
    """Call a function, which must not raise, every `HEARTBEAT_S` or `every_s` seconds while the block runs."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(HEARTBEAT_S if every_s is None else every_s):
            beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _boot() -> str | None:
    """Return an id of this machine's boot and of this container's processes, where the kernel has one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def start_time_of(pid: int) -> str | None:
    """Return the start time of a process on this machine, in ticks since boot, or None if it or /proc is missing."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]
