"""Claims and leases: the process that holds a run or a folder, and whether it is alive.

A lease is a small file that its holder refreshes: a record that names the process, or an empty mark, judged by its age.
"""

import contextlib
import datetime
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.storage.documents import now
from mlx_runtime.storage.files import Storage

HEARTBEAT_S = 10
"""Interval at which a holder refreshes its record."""

STALE_S = 60
"""Age at which the record of a process on another machine has expired."""

MARK_S = 300
"""Age at which a mark has expired; holders refresh theirs more often."""

READ_MARK = "used-"
"""Prefix of the marks of processes that read the dataset in a folder."""


def this_process() -> dict[str, Any]:
    """Return fields that identify this process among those of all machines."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "pid_started": start_time_of(pid)}


def lease(**fields: Any) -> dict[str, Any]:
    """Return a record of this process as a holder, with the current time."""
    return this_process() | {"status": "RUNNING", "heartbeat": now()} | fields


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


@contextlib.contextmanager
def mark(storage: Storage, folder: str) -> Iterator[None]:
    """Keep a fresh mark that a folder is being read while the block runs, or none if the storage is not writable."""
    name = f"{READ_MARK}{uuid.uuid4().hex}"

    def refresh() -> None:
        with contextlib.suppress(OSError):
            storage.write(b"", folder, name)

    refresh()
    try:
        with heartbeat(refresh, MARK_S / 5):
            yield
    finally:
        with contextlib.suppress(OSError):
            storage.remove_file(folder, name)


def is_fresh(changed_s: float) -> bool:
    """Return True if a mark last written at that time, in seconds since 1970, has not expired."""
    return time.time() - changed_s < MARK_S


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
