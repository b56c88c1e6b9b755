"""Connections between the machines of a run: both ends prove that they hold its key, and every message is signed.

A message is pickled, and unpickled only once its signature has been checked. Nothing is encrypted.
"""

import contextlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

GREETING = b"mlx nodes 1\n"
"""First bytes from the machine that is joined; the number is that of the protocol."""

NONCE_BYTES = PROOF_BYTES = 32

ANSWER_S = 10
"""Time limit for each answer of a machine while both ends authenticate."""

BEAT_S = 2.0
"""Interval at which both ends of a connection send at least one message."""

LOST_S = 30.0
"""Time without a message after which the other end counts as lost."""


class Channel:
    """One end of an authenticated connection. Any thread may send, but only one may receive."""

    def __init__(self, connection: "Connection[Any, Any]", secret: bytes, *, at_head: bool) -> None:
        self.connection = connection
        ends = [hmac.digest(secret, end, "sha256") for end in (b"head", b"node")]
        self._own_key, self._peers_key = ends if at_head else reversed(ends)
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def own_address(self) -> str:
        """Address of this machine in the network of the peer."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            return str(end.getsockname()[0])

    def send(self, *message: Any) -> None:
        content = pickle.dumps(message)
        with self._sending:
            self.connection.send_bytes(_signature(self._own_key, self._sent, content) + content)
            self._sent += 1

    def receive(self, timeout_s: float | None = LOST_S) -> tuple[Any, ...]:
        """Return the next message. Raises OSError or EOFError if the connection is lost or a signature is wrong."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"it sent nothing for {timeout_s:.0f} s")
        signed = self.connection.recv_bytes()
        signature, content = signed[:PROOF_BYTES], signed[PROOF_BYTES:]
        if not hmac.compare_digest(signature, _signature(self._peers_key, self._received, content)):
            raise OSError("it sent a message with a wrong signature")
        self._received += 1
        message: tuple[Any, ...] = pickle.loads(content)
        return message

    def close(self) -> None:
        """Close the connection, even if forked processes have inherited it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
            peer.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.connection.close()


def _signature(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")


def admit(connection: "Connection[Any, Any]", key: bytes) -> Channel:
    """Authenticate a peer that has connected to this process, which answers only a peer that holds the key.

    Raises:
        AuthenticationError, OSError, EOFError: the peer does not hold the key, or is not one.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(GREETING + own)
    answer = connection.recv_bytes(NONCE_BYTES + PROOF_BYTES)
    nonces = own + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], hmac.digest(key, b"node" + nonces, "sha256")):
        raise AuthenticationError("wrong key")
    connection.send_bytes(hmac.digest(key, b"head" + nonces, "sha256"))
    return Channel(connection, hmac.digest(key, b"session" + nonces, "sha256"), at_head=True)


def connect(address: tuple[str, int], key: bytes, source: str | None = None) -> Channel:
    """Connect to a process that calls `admit`, from the address `source` of this machine if it is given.

    Raises:
        AuthenticationError: the key is wrong, or the process at the address does not hold it.
        OSError: nothing answers at the address.
    """
    with socket.create_connection(address, timeout=ANSWER_S, source_address=(source, 0) if source else None) as peer:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_S, 0))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: Connection[Any, Any] = Connection(os.dup(peer.fileno()))
        try:
            return _authenticate(connection, key, peer)
        except BaseException:
            connection.close()
            raise


def _authenticate(connection: "Connection[Any, Any]", key: bytes, peer: socket.socket) -> Channel:
    try:
        greeting = connection.recv_bytes(len(GREETING) + NONCE_BYTES)
    except BlockingIOError:
        raise TimeoutError("it does not answer yet") from None
    except ConnectionError:  # as behind a forwarded port, until the run listens
        raise
    except OSError:  # another protocol
        greeting = b""
    if not greeting.startswith(GREETING):
        raise AuthenticationError("no run of this version of mlx answers there")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(GREETING) :] + own
    connection.send_bytes(own + hmac.digest(key, b"node" + nonces, "sha256"))
    try:
        proof = connection.recv_bytes(PROOF_BYTES)
    except BlockingIOError:
        raise TimeoutError("it does not answer yet") from None
    except (OSError, EOFError):
        raise AuthenticationError("the run has another key") from None
    if not hmac.compare_digest(proof, hmac.digest(key, b"head" + nonces, "sha256")):
        raise AuthenticationError("the process there does not hold the key of the run")
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # within a message
        peer.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(LOST_S), 0))
    return Channel(connection, hmac.digest(key, b"session" + nonces, "sha256"), at_head=False)
