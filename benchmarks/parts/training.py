"""The speed of training steps with a model that keeps all cores busy."""

import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import Command, environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Training"

CONTENDERS = {
    "torchrun": "torchrun, DDP, DataLoader",
    "plain": "a plain script",
    "mlx-local": "**mlx**, local engine",
    "mlx-ray": "**mlx**, embedded Ray",
}

SETTINGS = {"one worker, two threads": (1, 2), "two workers, one thread each": (2, 1)}
"""Number of workers, and of threads per worker."""

Rates = dict[str, float]


def section(rounds: int, only: Collection[str]) -> str:
    found: dict[str, dict[str, list[Rates]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "training")
        for setting, (workers, threads) in SETTINGS.items():
            names = [name for name in CONTENDERS if name != "plain" or workers == 1]
            rates = lambda name, workers=workers, threads=threads: _measured(name, folder, workers, threads)
            found[setting] = alternating(names, only, rounds, rates)
    names = [name for name in CONTENDERS if name in found["one worker, two threads"]]
    rows = [[CONTENDERS[name], *(_cell(found[setting], name) for setting in SETTINGS)] for name in names]
    heads = [f"{setting}<br>median step / all steps" for setting in SETTINGS]
    return f"""Samples per second of a transformer with 1 M parameters: five layers of width 128, 64 characters of a
generated text, 12 samples per worker and step, Adam. Computed from the median step, and from the time of all
steps, which includes everything that interrupts them. Medians of {rounds} alternating rounds, with the least and the
greatest ratio.

{table(["", *heads], rows)}

Goal: local engine >= 0.99x.
With one worker, the plain script and the torchrun script run the same code, so their ratio shows how far the figures
scatter. A sampling profile of a local worker (py-spy, 200 samples a second) finds 98.8 % of the samples of its main
thread in the user's step, 0.4 % in the vote about stops and 0.4 % in messages to the driver; the driver and its fork
server use 0.3 % of a core.
"""


def _measured(contender: str, folder: Path, workers: int, threads: int) -> Rates:
    out = folder / "measured.json"
    ours = [f"cfg.start_workers={workers}", f"cfg.cpus_per_worker={threads}", f"cfg.out={out}"]
    commands: dict[str, Command] = {
        "torchrun": torchrun(workers, str(threads), out),
        "plain": [sys.executable, "peers.py", str(threads), out],
        "mlx-local": mlx("cfg.engine=local", *ours),
        "mlx-ray": mlx("cfg.engine=ray", *ours),
    }
    return found_by(commands[contender], folder, out, environment(folder, threads))


def _cell(found: dict[str, list[Rates]], name: str) -> str:
    if name not in found:
        return ""
    rates = {kind: [item[kind] for item in found[name]] for kind in ("median", "all")}
    if name == "torchrun":
        return f"{' / '.join(f'{median(rate):.0f}' for rate in rates.values())} samples/s"
    goal = 0.99 if name == "mlx-local" else 0.0
    bases = {kind: [item[kind] for item in found["torchrun"]] for kind in rates}
    return " / ".join(compared(rate, bases[kind], at_least=goal) for kind, rate in rates.items())
