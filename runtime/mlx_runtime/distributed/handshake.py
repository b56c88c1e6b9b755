"""Process groups that nobody else can join, neither other users of the machine nor others on the network.

Gloo has no authentication: whoever connects first to a worker and sends a small number counts as its peer. So workers
meet in a store that only they can open, listen on one interface only (on one machine, the loopback interface),
prove to each other that they can open the store before they use a connection, and then refuse further connections.
"""

import contextlib
import ctypes
import datetime
import hmac
import os
import secrets
import socket
import stat
import sys
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, distributed_c10d

from mlx_runtime.errors import MlxError, WorkerLostError, short_message

LOOPBACK = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
"""Name of the loopback interface."""

PROOF_S = 30.0
"""Maximum time from a peer's connection to its proof that it belongs to the run."""

_TAG = 0x6D6C78
"""Tag of the proofs. They are the first messages of a group, so no other one has this tag."""

_SO_ATTACH_FILTER = 26  # Linux; not in Python's `socket`


def prove(group: Any, store: Any, rank: int, size: int) -> None:
    """Prove to each peer in a new group that this worker can open its store, and check that each of them can.

    Every worker of the group must call this, with its rank in the group and the group's own part of the store. The
    first caller generates the key. Each direction of each connection has its own proof, so that a stranger can
    neither replay nor forward one.

    Raises:
        MlxError: A connection is not from a worker of the run.
        WorkerLostError: A peer did not answer within `PROOF_S`, or is lost.
    """
    key = store.compare_set("key", "", secrets.token_hex(32))
    peers = [peer for peer in range(size) if peer != rank]
    received = {peer: torch.zeros(32, dtype=torch.uint8) for peer in peers}
    receiving = {peer: group.recv([received[peer]], peer, _TAG) for peer in peers}
    sending = {peer: group.send([_tensor(_proof(key, rank, peer))], peer, _TAG) for peer in peers}
    for peer, work in receiving.items():
        _wait(work, rank, peer)
        if not hmac.compare_digest(received[peer].numpy().tobytes(), _proof(key, peer, rank)):
            raise MlxError(
                f"another process connected to rank {rank} as if it were rank {peer}; nothing was "
                "read from it. Look for it among the processes of other users, and start the run again"
            )
    for peer, work in sending.items():
        _wait(work, rank, peer)


def _wait(work: Any, rank: int, peer: int) -> None:
    try:
        work.wait(datetime.timedelta(seconds=PROOF_S))
    except RuntimeError as error:  # it begins with a location in the source of gloo, and ends with advice
        why = short_message(error).partition("] ")[2].partition(". ")[0] or short_message(error)
        text = f"rank {peer} did not prove to rank {rank} that it belongs to the run: {why}"
        raise WorkerLostError(text) from error


def listening_sockets() -> set[int]:
    """Return the file descriptors of this process's listening sockets, if the system lists them."""
    found = set()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as candidate:
                    if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(int(name))
    return found


def refuse_connections(descriptor: int) -> None:
    """Make a listening socket drop new connections, where the system supports it. Established connections stay.

    The socket cannot be closed, because gloo would end the process.
    """
    drop_all = ctypes.create_string_buffer(b"\x06" + bytes(7))  # a program of one instruction: return 0
    program = _Program(1, ctypes.addressof(drop_all))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


class _Program(ctypes.Structure):
    """`struct sock_fprog` of Linux: a packet filter."""

    _fields_ = (("instructions", ctypes.c_ushort), ("program", ctypes.c_void_p))


def _proof(key: bytes, rank: int, peer: int) -> bytes:
    return hmac.digest(key, f"rank {rank} to rank {peer}".encode(), "sha256")


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class _Metaclass(type(ProcessGroupGloo)):  # type: ignore[misc]  # that of pybind11
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ProcessGroupGloo)  # torch returns groups as objects of their base class


class PrivateGloo(ProcessGroupGloo, metaclass=_Metaclass):
    """A gloo group of the run's workers that nobody else can join."""

    host: str | None = None  # address to listen on; None for the loopback interface

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta, enable_reconfigure: bool = False
    ) -> None:
        assert not enable_reconfigure  # of torch 2.14; `init_process_group` has it, `new_group` does not
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        before = listening_sockets()
        options._devices = [
            ProcessGroupGloo.create_device(interface="" if self.host else LOOPBACK, hostname=self.host or "")
        ]
        added = listening_sockets() - before
        options._threads, options._timeout = 2, timeout  # as by default
        super().__init__(store, rank, size, options)
        prove(self, store, rank, size)
        if len(added) == 1:  # otherwise another thread opened a socket, too
            refuse_connections(*added)


def keep_groups_private(host: str | None = None) -> None:
    """Make every gloo group that this process creates from now on a `PrivateGloo`, including those of user code.

    NCCL checks a random number in the store, and listens on the loopback interface, too. If workers are on several
    machines, this one is reached at `host`, and NCCL chooses its interfaces.
    """
    PrivateGloo.host = host
    if host is None:
        os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    distributed_c10d.ProcessGroupGloo = PrivateGloo  # type: ignore[misc]
