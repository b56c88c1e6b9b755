"""The store in which workers on several machines meet: kept by the driver, and open only to holders of the run's key.

Torch's own `TCPStore` has no authentication.
"""

import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from mlx_runtime.companions.nodes.channel import Channel, connect

PATIENCE = timedelta(minutes=5)
"""Time for a key to be set, where torch gives none; its own default."""

POLL_S = 0.01
"""Interval at which a worker asks for a key that is not set yet."""


class Values:
    """The values of one attempt, by key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def serve(self, channel: Channel) -> None:
        """Answer the requests of a worker until it closes its connection."""
        while True:
            operation, *arguments = channel.receive(None)
            with self._lock:
                channel.send(_OPERATIONS[operation](self._values, *arguments))


def _compare_set(values: dict[str, bytes], key: str, expected: bytes, desired: bytes) -> bytes:
    if values.get(key, b"") == expected:
        values[key] = desired
    return values.get(key, expected)


def _add(values: dict[str, bytes], key: str, amount: int) -> int:
    total = int(values.get(key, b"0")) + amount
    values[key] = str(total).encode()
    return total


_OPERATIONS: dict[str, Any] = {
    "set": lambda values, key, value: values.update({key: value}),
    "get": lambda values, key: values.get(key),
    "compare_set": _compare_set,
    "add": _add,
    "check": lambda values, keys: all(key in values for key in keys),
    "delete": lambda values, key: values.pop(key, None) is not None,
    "count": len,
}


class NetworkStore(Store):
    """A worker's connection to the `Values` of its attempt. torch calls the methods, also from other threads."""

    def __init__(self, address: tuple[str, int], key: bytes, attempt: int, source: str | None = None) -> None:
        super().__init__()
        self._channel = connect(address, key, source)
        self._channel.send("store", attempt)
        self._asking = threading.Lock()

    def _ask(self, *request: Any) -> Any:
        with self._asking:
            self._channel.send(*request)
            return self._channel.receive(None)[0]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._ask("get", key)
        return value

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = self._ask("add", key, amount)
        return total

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or PATIENCE).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"wait timeout for {', '.join(keys)}")
            time.sleep(POLL_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - the names by which torch calls them


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
