"""Machines with slow links, in network namespaces of this one, which needs root, and runs on them."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from commands import BIN, Command, RunError, environment

DEVICE = "eth0"
"""Network interface of each machine."""

MOST_S = 1800
"""Maximum time of a run."""


class Network:
    """Machines that are joined by a switch, and have no other connections.

    Links have no latency beyond that of queues, which need the kernel module `sch_netem`.

    Args:
        names: namespaces of the machines.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.addresses = [f"10.77.0.{number + 1}" for number in range(len(names))]

    def within(self, number: int, command: Command) -> Command:
        """Return a command that runs on a machine."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def sent(self) -> list[int]:
        """Return the bytes that each machine has sent."""
        counters = (Path(f"/sys/class/net/{name}/statistics/rx_bytes") for name in self.names)
        return [int(counter.read_text()) for counter in counters]

    def limit(self, number: int, mbit: float | None) -> None:
        """Limit the link of a machine in both directions, to Mbit/s; None removes the limit."""
        for prefix in (["ip", "netns", "exec", self.names[number]], []):
            command = [*prefix, "tc", "qdisc", "replace", "dev", DEVICE if prefix else self.names[number], "root"]
            if mbit is None:
                _run(*command, "pfifo_fast")
            else:
                burst = max(32_000, int(mbit * 1e6 / 8 * 0.005))  # the timer of the kernel has a resolution of 4 ms
                _run(*command, "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms")


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Yield a network of this many machines, and remove it afterwards."""
    prefix = f"b{os.getpid()}"
    names = [f"{prefix}n{number}" for number in range(count)]
    with ExitStack() as stack:
        _run("ip", "link", "add", prefix, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", prefix)
        _run("ip", "link", "set", prefix, "up")
        made = Network(names)
        for name, address in zip(names, made.addresses, strict=True):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", DEVICE, "netns", name)
            stack.callback(_run, "ip", "link", "delete", name)
            _run("ip", "link", "set", name, "master", prefix, "up")
            inside = ["ip", "-netns", name]
            _run(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run(*inside, "link", "set", device, "up")
        yield made


def train(
    machines: Network,
    workers: int,
    folder: Path,
    overrides: Sequence[str],
    look: Callable[[str], object],
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run an experiment with `mlx train join`, with one worker on each of the first machines.

    Args:
        machines: at least as many as workers.
        workers: number of workers.
        folder: of the experiment.
        overrides: of its config.
        look: called repeatedly while it trains, with what it has printed.
        variables: further environment variables.

    Raises:
        RunError: a process failed.
    """
    settings = environment(folder) | dict(variables or {})
    del settings["GLOO_SOCKET_IFNAME"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent, ExitStack() as stack:
        nodes = Path(parent) / "nodes.json"
        listed = [machines.addresses[rank] + ("" if rank else ":29500") for rank in range(workers)]
        nodes.write_text(json.dumps({str(rank): {"IP": address} for rank, address in enumerate(listed)}))
        joins = [[BIN / "mlx", "train", "join", nodes, "--name", f"node_{rank}"] for rank in range(workers)]
        joins[0] += overrides
        printed = stack.enter_context((Path(parent) / "printed").open("w+"))
        processes = []
        for number, command in enumerate(joins):
            process = subprocess.Popen(
                list(map(str, machines.within(number, command))),
                cwd=folder,
                env=settings,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)  # torchrun ends its processes
            processes.append(process)
        until = time.monotonic() + MOST_S
        while processes[0].poll() is None and time.monotonic() < until:
            look(Path(printed.name).read_text())
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(60)
        if any(process.poll() != 0 for process in processes):
            raise RunError(joins[0], Path(printed.name).read_text())


@contextmanager
def tunnel(machines: Network) -> Iterator[list[str]]:
    """Connect the first two machines by WireGuard, in their processes. Yields their addresses in the tunnel."""
    names, addresses = [f"wg{os.getpid()}{end}" for end in "ab"], ["10.78.0.1", "10.78.0.2"]
    keys = [_run("wg", "genkey") for _ in names]
    with ExitStack() as stack:
        for end, name in enumerate(names):
            process = subprocess.Popen([*map(str, machines.within(end, ["wireguard-go", "-f", name]))])
            stack.callback(process.wait)
            stack.callback(process.terminate)
            while not Path(f"/var/run/wireguard/{name}.sock").exists():
                if process.poll() is not None:
                    raise RunError(["wireguard-go", "-f", name], "it has ended")
                time.sleep(0.01)
        for end, name in enumerate(names):
            peer = [_run("wg", "pubkey", given=keys[1 - end]), "allowed-ips", f"{addresses[1 - end]}/32"]
            settings = ["private-key", "/dev/stdin", "listen-port", "51820", "peer", *peer]
            settings += ["endpoint", f"{machines.addresses[1 - end]}:51820"]
            _run(*map(str, machines.within(end, ["wg", "set", name, *settings])), given=keys[end])
            _run("ip", "-netns", machines.names[end], "address", "add", f"{addresses[end]}/24", "dev", name)
            _run("ip", "-netns", machines.names[end], "link", "set", name, "up")
        yield addresses


def _run(*command: str, given: str = "") -> str:
    return subprocess.run(command, check=True, input=given, stdout=subprocess.PIPE, text=True).stdout.strip()
