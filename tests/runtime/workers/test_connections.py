"""The driver receives the events of workers, over pipes and over a port to which anybody may send anything."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, answer_challenge
from typing import Any

import pytest
from faults import wait_for

from mlx_runtime.events import Event, Notice, StepProgress, WorkerConnected, encode
from mlx_runtime.loop.job import STOP
from mlx_runtime.workers import receiver as receiving
from mlx_runtime.workers.connections import Pipes, Remote
from mlx_runtime.workers.receiver import Receiver

pytestmark = pytest.mark.pure

PATIENCE_S = 8.0
"""How long anything may take on a busy machine; less than `HANDSHAKE_S`, so that nothing waits for a stranger."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver("127.0.0.1")
    yield receiver
    receiver.close()


def heard(receiver: Receiver) -> Event:
    """Return the next event."""
    return next(receiver.events(timeout_s=PATIENCE_S))


def silent(receiver: Receiver) -> socket.socket:
    """Connects and sends nothing."""
    return socket.create_connection(receiver.address)


def half_a_message(receiver: Receiver) -> socket.socket:
    """Announces a response to the challenge, and sends one byte of it."""
    connection = silent(receiver)
    connection.sendall(struct.pack("!i", 16) + b"x")
    return connection


def garbage(receiver: Receiver) -> socket.socket:
    connection = silent(receiver)
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    return connection


def huge(receiver: Receiver) -> socket.socket:
    """Announces two gigabytes."""
    connection = silent(receiver)
    connection.sendall(struct.pack("!i", (1 << 31) - 1))
    return connection


@pytest.mark.parametrize("stranger", [half_a_message, garbage, huge])
def test_a_stranger_keeps_no_worker_waiting(receiver: Receiver, stranger: Callable[[Receiver], socket.socket]) -> None:
    strangers = [stranger(receiver) for _ in range(3)]
    worker = Remote(receiver.address, receiver.key, rank=0)
    assert heard(receiver) == WorkerConnected(0)
    receiver.broadcast(STOP)
    wait_for(worker.stop_asked, PATIENCE_S)
    for connection in strangers:
        connection.close()


def test_a_stranger_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "HANDSHAKE_S", 0.2)
    receiver = Receiver("127.0.0.1")
    strangers = [silent(receiver), half_a_message(receiver)]
    for connection in strangers:
        connection.settimeout(60)
        while connection.recv(1000):  # the challenge; then nothing, when the other end has closed
            pass
    receiver.close()


def test_many_strangers_make_room_for_a_worker(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_PENDING", 5)
    before = threading.active_count()
    strangers = [silent(receiver) for _ in range(40)]
    Remote(receiver.address, receiver.key, rank=3)
    assert heard(receiver) == WorkerConnected(3)
    until = time.monotonic() + PATIENCE_S
    while (
        threading.active_count() > before + 5 + 2 and time.monotonic() < until
    ):  # and both ends of the worker's connection
        time.sleep(0.01)
    assert threading.active_count() <= before + 5 + 2
    assert len(receiver.pending) <= 5
    assert len(strangers) == 40


def test_a_wrong_key_is_refused(receiver: Receiver) -> None:
    with pytest.raises(AuthenticationError):
        Client(receiver.address, authkey=b"another")
    assert list(receiver.events(timeout_s=0.05)) == []


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\xff\x00", b"null", b"{", b"[]", b'"hello"', b"{}", b"[" * 100_000, b'{"kind": 1}', b'{"kind": []}'),
        *(b'{"kind": "other", "rank": 0}', b'{"kind": "WorkerConnected"}', b'{"kind": "WorkerConnected", "rank": "0"}'),
        *(b'{"kind": "WorkerConnected", "rank": true}', b'{"kind": "WorkerConnected", "rank": 0, "more": 1}'),
        *(b'{"kind": "Notice", "text": "x", "rank": 0}', b'{"kind": "WorkersLost", "ranks": [0, "1"], "why": ""}'),
        *(b'{"kind": "LoopEnded", "metrics": {"x": "1"}, "stopped": false}',),
        *(b'{"kind": "LoopEnded", "metrics": [], "stopped": false}',),
    ],
)
def test_what_is_no_event_is_dropped(receiver: Receiver, message: bytes) -> None:
    with Client(receiver.address, authkey=receiver.key) as connection:
        connection.send_bytes(message)
        connection.send_bytes(encode(Notice("still there")))
        assert list(receiver.events(timeout_s=PATIENCE_S)) == [Notice("still there")]


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_all_that_was_sent_is_drained(receiver: Receiver, delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(connection: Any, key: bytes) -> None:
        answer_challenge(connection, key)
        time.sleep(delay_s)  # the other end is connected now, and sends

    monkeypatch.setattr(receiving, "answer_challenge", answer)
    monkeypatch.setattr(receiving, "HANDSHAKE_S", 600.0)
    stranger = silent(receiver)
    with Client(receiver.address, authkey=receiver.key) as connection:
        for step in range(1000):
            connection.send_bytes(encode(StepProgress("train", 0, step, 1000, 0.0)))
    assert [event.step for event in receiver.drain(PATIENCE_S) if isinstance(event, StepProgress)] == list(range(1000))
    assert len(receiver.pending) == 1  # it does not wait for the stranger
    stranger.close()


def test_a_worker_inherits_a_pipe() -> None:
    pipes = Pipes()
    theirs = pipes.add()
    worker = Remote(pipes.address, pipes.key, 3, theirs)
    worker.send(Notice("here"))
    assert [next(pipes.events(PATIENCE_S)), next(pipes.events(PATIENCE_S))] == [WorkerConnected(3), Notice("here")]
    pipes.broadcast(STOP)
    wait_for(worker.stop_asked, PATIENCE_S)
