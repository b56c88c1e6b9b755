"""The channel between workers and the driver: events in one direction, orders in the other.

Workers send events for the driver to display, because Ray delivers the output of workers late and line by line: a
progress bar would be unreadable, and the last lines could arrive after the end.
"""

import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from mlx_runtime.events import Event

STOP, LOCATE = b"stop", b"locate"
"""Orders from the driver to its workers: save a checkpoint and end; report your position."""


def address_towards(peer: tuple[str, int]) -> str:
    """Return the address of this machine in the network of a peer. Sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in peer[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


class Sink(Protocol):
    """A worker's end of the channel."""

    def send(self, event: Event) -> None: ...

    def stop_asked(self) -> bool:
        """Return True once the driver wants this worker to stop."""
        ...


class Direct:
    """A sink in the driver's own process."""

    def __init__(self, handle: Callable[[Event], None], stop_asked: Callable[[], bool]) -> None:
        self.send, self.stop_asked = handle, stop_asked


class Inbox(Protocol):
    """The driver's end of the channel, like `connections.Pipes`."""

    address: tuple[str, int]
    key: bytes

    def events(self, timeout_s: float) -> Iterable[Event]: ...

    def drain(self) -> Iterable[Event]: ...

    def broadcast(self, order: bytes) -> None: ...

    def close(self) -> None: ...


class NoWorkers:
    """The driver's end if it trains itself, so that no worker connects."""

    address, key = ("127.0.0.1", 9), b""

    def events(self, timeout_s: float) -> Iterable[Event]:
        return ()

    def drain(self) -> Iterable[Event]:
        return ()

    def broadcast(self, order: bytes) -> None:
        pass

    def close(self) -> None:
        pass
