"""Steps, start and memory of an experiment in JAX."""

import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from commands import Command, environment, found_by, mlx, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "JAX"

CONTENDERS = {"plain": "a plain script with Flax NNX and Optax", "mlx": "**mlx**, `cfg.start_workers=0`"}

SIZES = {"1 M parameters, 5 layers of width 128": (5, 128), "0.02 M parameters, 1 layer of width 32": (1, 32)}
"""Number of layers, and width."""

GOALS = {"first": {"at_most": 1.3}, "median": {"at_least": 0.98}, "all": {"at_least": 0.98}, "mb": {"at_most": 1.2}}

UNITS = {"first": "{:.2f} s", "median": "{:.0f}/s", "all": "{:.0f}/s", "mb": "{:.0f} MB"}


def section(rounds: int, only: Collection[str]) -> str:
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "nnx")
        for size, (layers, width) in SIZES.items():
            measure = lambda name, layers=layers, width=width: _measured(name, folder, layers, width)
            found = alternating([*CONTENDERS], only, rounds, measure)
            for name in found:
                rows.append([f"{size}: {CONTENDERS[name]}", *(_cell(found, name, kind) for kind in GOALS)])
    head = ["one process", "to the first step", "samples/s, median step", "samples/s, all steps", "peak memory"]
    return f"""The same transformer of Flax NNX, Adam and a metric of TorchMetrics per step: 64 characters of random
text, 12 samples per step. mlx also writes TensorBoard events, the record of the run and a checkpoint. There is no cache
of compiled programs. Medians of {rounds} alternating rounds, with the least and the greatest ratio.

{table(head, rows)}

Goals: to the first step <= 1.3x, samples/s >= 0.98x, memory <= 1.2x. mlx adds about 0.2 ms to each
step, which counts in steps of 2 ms.
"""


def _measured(contender: str, folder: Path, layers: int, width: int) -> dict[str, float]:
    out = folder / "measured.json"
    sizes = [f"models.net.layers={layers}", f"models.net.width={width}"]
    commands: dict[str, Command] = {
        "plain": [sys.executable, "peers.py", str(layers), str(width), out],
        "mlx": mlx("cfg.start_workers=0", f"cfg.out={out}", *sizes),
    }
    return found_by(commands[contender], folder, out, {**environment(folder), "STARTED": str(time.time())})


def _cell(found: dict[str, list[dict[str, float]]], name: str, kind: str) -> str:
    values = [item[kind] for item in found[name]]
    if name == "plain":
        return UNITS[kind].format(median(values))
    return compared(values, [item[kind] for item in found["plain"]], **GOALS[kind])
