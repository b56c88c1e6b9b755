"""The command by which a machine joins a run."""

import getpass
import os
import socket
import sys
from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.errors import UsageError, suggest
from mlx_runtime.settings import prepare_fork

KEY = "MLX_JOIN_KEY"


@click.command("join")
@click.argument("where", metavar="HOST:PORT|FILE")
@click.option("--name", metavar="NODE", type=options.word, help="Name of this machine in the run, like node_1.")
@click.option(
    "--key-file",
    type=click.Path(allow_dash=True),
    help=f"File with the key of the run; - reads it from stdin. Default: {KEY}, or a prompt.",
)
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=600, show_default=True, help="Seconds to wait for the run."
)
@options.debug
def train_join(where: str, name: str | None, key_file: str | None, wait_s: float) -> None:
    """Train on this machine as part of a run that another one has started with cfg.engine=nodes.

    That machine prints HOST:PORT. FILE is its nodes.json, whose first node has a port.
    """
    from mlx_runtime.companions.nodes import roster

    source = None
    if Path(where).is_file() or where.endswith(".json"):
        nodes = {node.name: node for node in roster.read(Path(where))}
        first, *_ = nodes.values()
        if not first.port:
            raise UsageError(f"{where} has no port for {first.name}, where others join; write its IP as HOST:PORT")
        address = str(first.host), first.port
        if name is not None and name not in nodes:
            raise UsageError(f"{where} has no machine {name!r:.60}.{suggest(name, nodes)}")
        if name is not None and _is_here(str(nodes[name].host)):
            source = nodes[name].host
    else:
        try:
            address = roster.parse_address(where, "the argument")
        except ValueError as error:
            raise UsageError(str(error)) from None
    key = _key(key_file)
    if len(key.encode()) < roster.KEY_BYTES:
        raise UsageError(f"the key has {len(key)} characters; those of runs have at least {roster.KEY_BYTES}")
    prepare_fork()
    from mlx_runtime.companions.nodes import agent  # here: it imports torch, which a prompt need not wait for

    sys.exit(agent.join(address, key, name, source, wait_s))


def _is_here(host: str) -> bool:
    """Return True if a socket of this machine can have the address."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def _key(file: str | None) -> str:
    key = os.environ.pop(KEY, "")  # workers do not need it
    if file == "-":
        key = sys.stdin.readline()
    elif file is not None:
        key = Path(file).read_text()
    elif not key:
        if not sys.stdin.isatty():
            raise UsageError(f"the key of the run is missing; set {KEY}, or pass --key-file FILE")
        key = getpass.getpass("key of the run: ")
    if not key.strip():
        raise UsageError("the key of the run is empty")
    return key.strip()
