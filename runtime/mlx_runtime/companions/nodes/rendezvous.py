"""The first machine's side of the rendezvous: admits the other machines of a run, and exchanges messages with them."""

import contextlib
import platform
import queue
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
from mlx_runtime.training.loop import Listener

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


class Rendezvous(Listener):
    """Listens for the other machines of a run, and for the workers of all machines, which meet in a store.

    Args:
        nodes: Machines of the run, this one first.
        key: Key of the run.
        offer: Facts for machines that join: the code, and the storage.
        gpus: GPUs that each worker needs.
    """

    def __init__(self, nodes: list[Node], host: str, key: bytes, offer: dict[str, Any], gpus: float) -> None:
        self.key, self.members = key, dict[str, Member]()
        self.stores: dict[int, Values] = {}  # by number of the attempt
        self._nodes, self._offer, self._gpus = {node.name: node for node in nodes[1:]}, offer, gpus
        self._joining = threading.Lock()  # guards `members`
        self._received: queue.SimpleQueue[tuple[Member | None, Message]] = queue.SimpleQueue()
        super().__init__(host, nodes[0].port)

    def missing(self) -> list[Node]:
        """Return the machines that have not joined, or are not ready yet."""
        return [node for name, node in self._nodes.items() if name not in self.members or not self.members[name].ready]

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
        if kind == "store":
            self.stores[fact].serve(channel)
        elif kind == "join":
            self._serve_member(channel, fact)

    def _serve_member(self, channel: Channel, hello: dict[str, Any]) -> None:
        with self._joining:
            node = self._admit(hello)
            if isinstance(node, Node):
                member = self.members[node.name] = Member(node, channel, hello)
                member.send("welcome", self._offer | {"name": node.name})
        if isinstance(node, str):
            channel.send("refused", node, hello["name"] in (None, *self._nodes) and self._is_full(hello))
            self._received.put((None, ("refused", node)))
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

    def _is_full(self, hello: dict[str, Any]) -> bool:
        return hello["name"] in self.members if hello["name"] else not self._free(hello["address"])

    def _free(self, address: str) -> list[Node]:
        """Return the machines that a peer at an address may be, the best guess first."""
        free = [node for name, node in self._nodes.items() if name not in self.members]
        known = [node for node in self._nodes.values() if node.host == address]
        return [node for node in free if node in known] if known else [node for node in free if node.host is None]

    def _admit(self, hello: dict[str, Any]) -> Node | str:
        """Return the machine that joins, or the reason why it may not."""
        who = f"{hello['name'] or 'a machine'} ({hello['address']})"
        for name, version in versions().items():
            if (other := hello["versions"].get(name)) != version:
                return f"{who} has {name} {other}, and the first machine {version}; install the same version"
        for member in list(self.members.values()):
            if member.process == hello["process"]:  # it has lost its connection before this machine noticed
                self._forget(member)
        if hello["name"] and hello["name"] not in self._nodes:
            return f"the run has no machine {hello['name']!r:.60}.{suggest(hello['name'], self._nodes, 'nodes.json')}"
        if self._is_full(hello):
            if hello["name"] or not self.missing():
                return f"{hello['name'] or 'every machine of the run'} has joined already"
            return f"{who} is none of the addresses in nodes.json; add --name to say which machine it is"
        node = self._nodes[hello["name"]] if hello["name"] else self._free(hello["address"])[0]
        if self._gpus and hello["gpus"] < self._gpus * (node.slots or 1):
            needs = f"{self._gpus * (node.slots or 1):g} GPUs for {node.slots} workers"
            return f"{node.name} ({hello['address']}) has {hello['gpus']} GPUs, and needs {needs}"
        return node

    def _forget(self, member: Member) -> None:
        del self.members[member.node.name]
        self._received.put((member, ("lost", "it has joined again")))
        member.channel.close()
