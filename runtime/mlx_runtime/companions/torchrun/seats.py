"""The seat that torchrun has given this process, and the store in which all processes of a run meet."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mlx_runtime.errors import ConfigError, short_message
from mlx_runtime.loop.job import address_towards
from mlx_runtime.workers.local import NODE_NAME

MEET_S = 600.0
"""Maximum time until the store of the run answers, in seconds."""

OWN_NAME = "127.0.1.1"
"""Address of a machine's own name in Debian's /etc/hosts, which others cannot reach."""

ANY_PEER = ("192.0.2.1", 9)
"""Address that no machine has (RFC 5737), in the direction of the default route."""


@dataclass(frozen=True)
class Seat:
    """The position of this process, from the variables of torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str  # address of the store, which is on the machine of rank 0
    port: int

    @classmethod
    def read(cls) -> "Seat":
        """Read the variables; raise ConfigError if one is missing or wrong."""
        numbers = [_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
        rank, world_size, local_rank, local_world_size, port = numbers
        if rank >= world_size:
            raise ConfigError(f"RANK={rank} must be less than WORLD_SIZE={world_size}")
        if not 0 < port < 1 << 16:
            raise ConfigError(f"MASTER_PORT={port} must be from 1 to 65535")
        return cls(rank, world_size, local_rank, local_world_size, os.environ["MASTER_ADDR"], port)

    @property
    def keeps_store(self) -> bool:
        """True if the driver keeps the store, because torchrun does not, or `srun` has started the processes."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    @property
    def title(self) -> str:
        """Name of this process in messages of others, like `rank 1 (node_1, 10.0.0.2)`."""
        names = [name for name in (os.environ.get(NODE_NAME), self.host()) if name]
        return f"rank {self.rank} ({', '.join(names)})"

    def host(self) -> str:
        """Return the address of this machine in the network of the run."""
        try:
            resolved = socket.gethostbyname(self.master)
            if self.rank < self.local_world_size and resolved != OWN_NAME:
                return resolved
            return address_towards(ANY_PEER if resolved == OWN_NAME else (resolved, 1))
        except OSError as error:
            raise ConfigError(f"MASTER_ADDR is {self.master!r:.100}: {error.strerror or error}") from error

    def store(self, *, serves: bool = False) -> Any:
        """Connect to the store; with `serves`, in the driver, keep it unless torchrun does. It answers anybody.

        Raises:
            RuntimeError: there is no store.
            ConfigError: the driver can neither keep nor reach it.
        """
        keeps = serves and self.keeps_store
        try:
            store = TCPStore(self.master, self.port, None, keeps, timedelta(seconds=MEET_S), wait_for_workers=False)
        except RuntimeError as error:
            if not serves:
                raise
            at = f"{self.master}:{self.port}"
            why = short_message(error)
            raise ConfigError(f"cannot open the store at MASTER_ADDR:MASTER_PORT, {at}: {why}") from error
        return PrefixStore(f"mlx/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r:.40}, not a number; torchrun sets it, but with srun you must set it")
    return int(text)
