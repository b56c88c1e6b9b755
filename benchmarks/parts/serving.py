"""Requests per second and latencies of servers, with one replica of a model, compared with servers written by hand."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commands import BIN, RunError, environment, found_by, mlx, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Serving"

CONTENDERS = {
    "fastapi": "FastAPI, by hand",
    "ray": "Ray Serve",
    "ray-batching": "Ray Serve, `@serve.batch`",
    "mlx-single": "**mlx**, `--max-batch 1`",
    "mlx": "**mlx**",
}

NETWORKS = {
    "images": ("image", "the network of the template"),
    "words": ("tokens", "a transformer with two layers"),
}
"""The column that each network reads, and its title."""

CLIENTS = (1, 8, 64)
LOAD_S = 3.0

SCRIPT = "from src.networks import *; import json, sys; print(json.dumps(example(sys.argv[1])))"

Point = Mapping[str, float]


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "serving")
        tables = []
        for number, (network, (column, title)) in enumerate(NETWORKS.items(), 1):
            subprocess.run(mlx(f"cfg.serves={network}"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
            values = subprocess.run(
                [sys.executable, "-c", SCRIPT, network], cwd=folder, check=True, capture_output=True
            ).stdout
            body = json.dumps({"rows": [{column: json.loads(values)}]}).encode()

            def measure(contender: str, network: str = network, run: int = number, body: bytes = body) -> list[Point]:
                with server(contender, network, f"run_{run:03d}", folder) as url:
                    return [load(url, clients, body, folder) for clients in CLIENTS]

            found = alternating(list(CONTENDERS), only, rounds, measure)
            head = [title, *(f"{count} client{'s' if count > 1 else ''}" for count in CLIENTS)]
            tables.append(table(head, rows(found)))
    return f"""One row per request, as JSON, on a connection that is kept open; each client sends its next request after
the answer to the last one. Server and clients share two cores; one thread computes. The first row has requests per
second, with the median and the 99th percentile of their duration, the others ratios of requests per second, with the
least and the greatest, and their own durations. Medians of {rounds} alternating rounds.

{tables[0]}

{tables[1]}

Goals: at every point at least as many requests per second as the better of FastAPI and Ray Serve, and with 64 clients
at least twice as many as without batching. A core computes a batch of the transformer hardly faster than its rows one
by one, so that batching gains less there.
"""


def rows(found: Mapping[str, Sequence[Sequence[Point]]]) -> Iterator[list[str]]:
    """Yield the rows of a table, one per contender."""
    base = next(iter(found))
    for name, measured in found.items():
        cells = []
        for place in range(len(CLIENTS)):
            own, others = ([each[place] for each in item] for item in (measured, found[base]))
            rates = [[point["per_s"] for point in item] for item in (own, others)]
            first = f"{median(rates[0]):,.0f}/s" if name == base else compared(*rates)
            times = " / ".join(f"{median(point[key] for point in own):.1f}" for key in ("p50_ms", "p99_ms"))
            failed = sum(point["failed"] for point in own)
            cells.append(f"{first}, {times} ms" + (f", {failed:,.0f} failed" if failed else ""))
        yield [CONTENDERS[name], *cells]


@contextlib.contextmanager
def server(contender: str, network: str, run: str, folder: Path) -> Iterator[str]:
    """Start a server. Yields the URL for predictions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command: list[Any] = [sys.executable, "peers.py", contender, network, str(port)]
    if contender.startswith("mlx"):
        command = [BIN / "mlx", "serve", "run", "serving", run, "--port", str(port)]
        command += ["--max-batch", "1"] if contender == "mlx-single" else []
    url = f"http://127.0.0.1:{port}/predict"
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=printed, stderr=printed)
        try:
            for _ in range(600):
                if process.poll() is not None or answers(url):
                    break
                time.sleep(0.1)
            else:
                raise RunError(command, "it does not answer")
            if process.returncode is not None:
                printed.seek(0)
                raise RunError(command, printed.read())
            yield url
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    """Return True if a server answers requests, even wrong ones."""
    try:
        urllib.request.urlopen(url, data=b"{}", timeout=2)
    except urllib.error.HTTPError as error:
        return error.code not in (404, 503)
    except OSError:
        return False
    return True


def load(url: str, clients: int, body: bytes, folder: Path) -> Point:
    """Return the figures of a bounded load."""
    (folder / "body.json").write_bytes(body)
    out = folder / "load.json"
    command = ["sh", "-c", f"{sys.executable} load.py {url} {clients} {LOAD_S} {out} <body.json"]
    point: Point = found_by(command, folder, out, environment(folder))
    return point
