"""The first machine's side of the rendezvous: admits the other machines of a run, and exchanges messages with them."""

import contextlib
import platform
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from mlx_runtime import __version__
from mlx_runtime.companions.nodes.channel import BEAT_S, LOST_S, Channel, admit
from mlx_runtime.companions.nodes.roster import Node
from mlx_runtime.companions.nodes.store import Values
from mlx_runtime.errors import MlxError, short_message, suggest
from mlx_runtime.workers.receiver import Receiver

PREPARE_S = 600.0
"""Time for a machine that has joined to fetch and import the code."""

FLUSH_S = 3.0
"""Time for the last messages to a machine."""

RESTORED = "restored"
"""Folder of the checkpoint that a run starts from, below the storage of a machine that does not see the real one."""

Message = tuple[Any, ...]


def versions() -> dict[str, str]:
    """Return the versions that all machines of a run must have in common."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": str(torch.__version__), "mlx-runtime": __version__}


class Member:
    """A machine that has joined. Its messages are sent by a thread of its own."""

    def __init__(self, node: Node, channel: Channel, hello: dict[str, Any]) -> None:
        self.node, self.channel, self.process, self.address = node, channel, hello["process"], hello["address"]
        self.ready = self.sees_storage = False
        self._messages: queue.SimpleQueue[Message | Iterable[Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=node.name, daemon=True)
        self._thread.start()

    @property
    def title(self) -> str:
        return f"{self.node.name} ({self.address})"

    def send(self, *message: Any) -> None:
        self._messages.put(message)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send messages that the thread takes from an iterator one by one."""
        self._messages.put(messages)

    def close(self) -> None:
        """Send the remaining messages, and close the connection."""
        self._messages.put(None)
        self._thread.join(FLUSH_S)
        self.channel.close()

    def _send(self) -> None:
        try:
            while True:
                try:
                    item = self._messages.get(timeout=BEAT_S)
                except queue.Empty:
                    item = ("beat",)
                if item is None:
                    return
                for message in [item] if isinstance(item, tuple) else item:
                    self.channel.send(*message)
        except (OSError, MlxError):  # the machine is gone, or the storage does not answer
            self.channel.close()


class Rendezvous(Receiver):
    """Listens for the other machines of a run, and for the workers of all machines, which meet in a store.

    Args:
        nodes: Machines of the run, this one first.
        key: Key of the run.
        offer: Facts for machines that join: the code, and the storage.
        gpus: GPUs that each worker needs.
    """

    def __init__(self, nodes: list[Node], host: str, key: bytes, offer: dict[str, Any], gpus: float) -> None:
        self.members = dict[str, Member]()
        self.stores: dict[int, Values] = {}  # by number of the attempt
        self._nodes, self._offer, self._gpus = {node.name: node for node in nodes[1:]}, offer, gpus
        self._addresses = {node.name: _resolved(node.host) for node in nodes}
        self._joining = threading.Lock()  # guards `members`
        self._received: queue.SimpleQueue[tuple[Member | None, Message]] = queue.SimpleQueue()
        super().__init__(host, nodes[0].port, key)

    def missing(self) -> list[Node]:
        """Return the machines that have not joined, or are not ready yet."""
        ready = {name for name, member in list(self.members.items()) if member.ready}
        return [node for name, node in self._nodes.items() if name not in ready]

    def messages(self) -> Iterator[tuple[Member | None, Message]]:
        """Yield the messages that have arrived, each with its sender. Lost members send `("lost", why)`.

        `("refused", why)` has no sender.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._received.get_nowait()

    def drop(self, member: Member, why: str) -> None:
        """Close the connection of a member, which counts as lost, unless that has happened already."""
        with self._joining:
            if self.members.get(member.node.name) is not member:
                return
            del self.members[member.node.name]
        self._received.put((member, ("lost", why)))
        member.channel.close()

    def close(self) -> None:
        super().close()
        with self._joining:
            members, self.members = [*self.members.values()], {}
        for member in members:
            member.send("end")
        for member in members:
            member.close()

    def authenticate(self, connection: "Connection[Any, Any]") -> Channel:
        return admit(connection, self.key)

    def serve(self, connection: "Connection[Any, Any]", channel: Channel) -> None:
        kind, fact = channel.receive()
        if kind == "store" and fact in self.stores:  # otherwise a worker of an earlier attempt
            self.stores[fact].serve(channel)
        elif kind == "join":
            self._serve_member(channel, fact)

    def _serve_member(self, channel: Channel, hello: dict[str, Any]) -> None:
        with self._joining:
            node = self._admit(hello)
            if isinstance(node, Node):
                member = self.members[node.name] = Member(node, channel, hello)
                member.send("welcome", self._offer | {"name": node.name})
        if isinstance(node, tuple):
            channel.send("refused", *node)
            if not node[1]:
                self._received.put((None, ("refused", node[0])))
            return
        why = "its connection was closed"
        try:
            while True:
                kind, *facts = channel.receive(LOST_S if member.ready else PREPARE_S)
                if kind == "ready":
                    member.sees_storage, member.ready = facts[0], True
                if kind != "beat":
                    self._received.put((member, (kind, *facts)))
        except EOFError:
            pass
        except OSError as error:
            why = short_message(error) if isinstance(error, TimeoutError) else why
        finally:
            self.drop(member, why)

    def _admit(self, hello: dict[str, Any]) -> Node | tuple[str, bool]:
        """Return the machine that joins, or the reason why it may not, and whether it may later."""
        name, address = hello["name"], hello["address"]
        who = f"{name or 'a machine'} ({address})"
        for package, version in versions().items():
            if (other := hello["versions"].get(package)) != version:
                text = f"{who} has {package} {other}, and the first machine {version}; install the same version"
                return text, False
        for member in list(self.members.values()):
            if member.process == hello["process"]:  # it has lost its connection before this machine noticed
                self._forget(member)
        if name:
            if name not in self._nodes:
                return f"the run has no machine {name!r:.60}.{suggest(name, self._nodes, 'nodes.json')}", False
            possible = [self._nodes[name]]
        elif not (possible := self._possible(address)):
            return f"{who} has none of the addresses in nodes.json; add --name to say which machine it is", False
        free = [node for node in possible if node.name not in self.members]
        if not free:
            return f"{name or ', '.join(node.name for node in possible)} has joined already", True
        needed = self._gpus * (free[0].slots or 1)
        if hello["gpus"] < needed:
            text = (
                f"{free[0].name} ({address}) has {hello['gpus']} GPUs, and its {free[0].slots} workers need {needed:g}"
            )
            return text, False
        return free[0]

    def _possible(self, address: str) -> list[Node]:
        """Return the machines that may have an address: those that are listed with it, or else those without one."""
        nodes = self._nodes.values()
        return [node for node in nodes if self._addresses[node.name] == address] or [
            node for node in nodes if node.host is None
        ]

    def _forget(self, member: Member) -> None:
        del self.members[member.node.name]
        self._received.put((member, ("lost", "it has joined again")))
        member.channel.close()


def _resolved(host: str | None) -> str | None:
    try:
        return socket.gethostbyname(host) if host else None
    except OSError:
        return host
