"""The time until a training function trains, and that of its whole run, compared with Ray's own trainer."""

import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import environment, workplace
from page import table
from processes import cost
from rounds import alternating

from parts.starting import Start, rows

TITLE = "Training functions"

CONTENDERS = {
    "ray": "Ray's `TorchTrainer`",
    "mlx-ray": '**mlx**, `Trainer(engine="ray")`',
    "mlx-local": "**mlx**, local engine",
}


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")

        def start(contender: str) -> Start:
            out = folder / "stepped"
            out.unlink(missing_ok=True)
            command = [sys.executable, "functions.py", contender, out]
            taken = cost(command, folder, environment(folder))
            return Start(float(out.read_text().split()[0]) - taken.started, taken.wall_s, taken.cpu_s)

        found = alternating(list(CONTENDERS), only, rounds, start)
    head = ["two workers", "to the first step", "whole run", "CPU seconds of all processes"]
    return f"""The same function with `trainer.run(train_func)` of mlx and `TorchTrainer(train_func).fit()` of Ray, in a
script of its own: one epoch of 2,048 images with a small network in DistributedDataParallel, and one report. Measured
from the start of the script, which starts Ray if it uses it. Medians of {rounds} alternating rounds, with the least and
the greatest ratio.

{table(head, rows(found, CONTENDERS))}
"""
