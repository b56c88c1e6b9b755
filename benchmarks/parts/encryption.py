"""Traffic between machines with and without a WireGuard tunnel: what can be read on the link, and what steps take."""

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import workplace
from networks import network, tunnel
from page import table
from rounds import alternating, median

from parts.links import SIZES, Found, run_on
from parts.sharding import Work

TITLE = "Encryption"

PATTERNS = {"job": b"versions", "weights": bytes.fromhex("0000803f") * 16}
"""A part of the message with the job, and weights of layer norms, which are ones."""

CONTENDERS = {
    f"`{name}`{tunnel}": (name, bool(tunnel)) for name in ("ddp", "pipeline") for tunnel in ("", ", WireGuard")
}


def section(rounds: int, only: Collection[str]) -> str:
    if os.geteuid() or not (shutil.which("wireguard-go") and shutil.which("wg")):
        print(f"{TITLE}: not measured, because it needs root, wireguard-go and wireguard-tools")
        return ""
    with tempfile.TemporaryDirectory(prefix="bench-") as parent, network(2) as machines, tunnel(machines) as addresses:
        folder, plain = workplace(Path(parent), "sharding"), machines.addresses

        def measured(contender: str) -> tuple[Found, set[str]]:
            name, encrypts = CONTENDERS[contender]
            machines.addresses = addresses if encrypts else plain
            with captured(machines.names[0]) as seen:
                return run_on(machines, folder, name, SIZES[0], (None, None, None)), seen

        found = alternating(list(CONTENDERS), only, rounds, measured)
    rows = []
    for contender, runs in found.items():
        read = sorted(set[str]().union(*(seen for _, seen in runs)))
        step = median(median(seconds for at in run.steps for seconds in at) for run, _ in runs)
        rows.append([contender, " and ".join(read) or "nothing", f"{max(runs[0][0].sent):.1f}", f"{step:.2f} s"])
    size = Work(*SIZES[0], 8, 0, 2).parameters / 1e6
    return f"""The GPT with {size:.0f} M parameters of *Slow links*, on two machines in network namespaces with
unlimited links. All packets are searched for the message with the job, and for known weights. The
tunnel is wireguard-go, which encrypts outside of the kernel, on the cores that train. Medians of {rounds}
alternating rounds.

{table(["", "readable on the link", "MB sent per step", "step"], rows)}
"""


@contextmanager
def captured(device: str) -> Iterator[set[str]]:
    """Search the packets of a network interface. Yields the names of `PATTERNS`, to which it adds while it runs."""
    seen: set[str] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as packets:
        packets.bind((device, 0))
        packets.settimeout(0.2)
        ended = threading.Event()

        def search() -> None:
            while not ended.is_set():
                try:
                    packet = packets.recv(1 << 17)
                except TimeoutError:
                    continue
                seen.update(name for name, pattern in PATTERNS.items() if name not in seen and pattern in packet)

        thread = threading.Thread(target=search)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()
