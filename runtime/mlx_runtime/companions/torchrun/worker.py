"""A process with a rank above 0: it takes the job of rank 0, trains, and reports how that ended."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from mlx_runtime.companions.torchrun.offers import Offer
from mlx_runtime.companions.torchrun.seats import Seat
from mlx_runtime.distributed.handshake import keep_groups_private
from mlx_runtime.distributed.messages import encode
from mlx_runtime.errors import MlxError, WorkerLostError, full_message, short_message
from mlx_runtime.events import WorkerConnected
from mlx_runtime.events import encode as encode_event
from mlx_runtime.workers.local import gpus_of
from mlx_runtime.workers.process import WorkerJob, train_in_group
from mlx_runtime.workers.stop_requests import DRIVER_SIGNALS

SHARED = b"shared"
"""What rank 0 answers if all processes see the storage."""

LOST = 75
"""Exit code of a process that has lost others: the next attempt may resume the run (`EX_TEMPFAIL`)."""

POLL_S = 0.2
"""Interval at which the store is asked for something that may take long."""

UNWIND_S = 5.0
"""Time for a worker to end by itself once the driver is gone; it may wait for another one."""

DEAD_S = 30
"""Time without a sign of life after which a machine is lost."""


def follow() -> None:
    """Train as a worker, and exit, unless this is rank 0, which drives the run."""
    seat = Seat.read()
    if seat.rank:
        code = work(seat)
        sys.stdout.flush()
        os._exit(code)  # like `run_worker`


def work(seat: Seat) -> int:
    """Take part in the run of rank 0, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with torchrun, even if that is killed
    try:
        store = seat.store()
        if store.add(f"joined/{seat.rank}", 1) > 1:
            raise WorkerLostError(f"{seat.title} has already left this attempt; it can join the next one")
        offer = Offer.decode(wait_for(store, "job"))
        problem, sees, driver = offer.problem(seat.local_world_size), offer.sees_storage(), None
        if not problem:
            try:
                driver = Driver(seat.rank, offer.job.receiver)
            except (OSError, EOFError, AuthenticationError) as why:
                problem = f"cannot reach the driver at {offer.job.receiver[0][0]}: {short_message(why)}"
        store.set(f"ready/{seat.rank}", encode([seat.title, problem, sees]))
        if driver is None:
            raise MlxError(f"{seat.title} {problem}")
        error = _train(seat, offer, offer.job_here(sees=sees, shared=wait_for(store, "start") == SHARED), driver)
        lost = isinstance(error, WorkerLostError)
        if error is not None:
            print(f"error: {full_message(error)}", file=sys.stderr)
        store.set(f"ended/{seat.rank}", encode([error is None, lost, "" if error is None else full_message(error)]))
        store.add("ended", 1)
        return LOST if lost else int(error is not None)
    except MlxError as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST if isinstance(error, WorkerLostError) else 1
    except RuntimeError as error:  # of the store
        print(f"error: {seat.title} lost its connection to rank 0: {short_message(error)}", file=sys.stderr)
        return LOST


def wait_for(store: Any, key: str) -> bytes:
    """Return a value that may be set hours later. Raises RuntimeError if the store is gone."""
    while not store.check([key]):
        time.sleep(POLL_S)
    value: bytes = store.get(key)
    return value


def _train(seat: Seat, offer: Offer, job: Any, driver: "Driver") -> BaseException | None:
    host, first_rank = seat.host(), seat.rank - seat.local_rank
    shared = WorkerJob(job, seat.world_size, offer.backend, offer.timeout_s, Path(), seat.store, host, first_rank)
    os.environ.update(gpus_of(shared, seat.local_rank, seat.local_world_size))
    keep_groups_private(host)
    for number in DRIVER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the driver gets them, too, and decides
    error = train_in_group(shared, seat.rank, driver)
    driver.done.set()
    return error


class Driver:
    """The connection to the driver, whose loss ends this process."""

    def __init__(self, rank: int, receiver: Any) -> None:
        (host, port), key = receiver
        self._connection = Client((host, port), authkey=key)
        keep_alive(self._connection)
        self.done = threading.Event()  # this worker no longer trains
        self.send_bytes = self._connection.send_bytes
        self.send_bytes(encode_event(WorkerConnected(rank)))  # the driver notices from now on if this process ends

    def recv_bytes(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            if not self.done.wait(UNWIND_S):
                print("error: lost the connection to the driver", file=sys.stderr, flush=True)
                os._exit(LOST)
            raise


def keep_alive(connection: Any) -> None:
    """Let the kernel close a connection to a machine that gives no sign of life, or to a network that is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": DEAD_S * 1000}.items():
            if (option := getattr(socket, name, None)) is not None:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
