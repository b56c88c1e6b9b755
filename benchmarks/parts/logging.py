"""The cost of recording metrics: epochs with and without it, alternating within one run."""

import math
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Logging"

CONTENDERS = {
    "writer": "torchrun, TorchMetrics' `compute()`, SummaryWriter",
    "lightning": "Lightning, `self.log` of metrics, TensorBoardLogger",
    "mlx-untracked": "**mlx**, no trackers",
    "mlx": "**mlx**, TensorBoard",
}


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "logging")
        found = alternating(list(CONTENDERS), only, rounds, lambda contender: _measured(contender, folder))
    rows = []
    for contender, measured in found.items():
        without = median(item["off"] for item in measured)
        goal = 1.03 if contender.startswith("mlx") else math.inf
        ratio = compared([item["on"] for item in measured], [item["off"] for item in measured], at_most=goal, digits=3)
        more = median(item["on"] - item["off"] for item in measured)
        inside = median(item["inside"] for item in measured)
        own = f"{1e6 * inside:.0f} µs" if contender.startswith("mlx") else ""
        rows.append([CONTENDERS[contender], f"{1000 * without:.2f}", ratio, f"{1e6 * more:.0f} µs", own])
    return f"""Four metrics and two losses of TorchMetrics are updated with every batch, in all epochs. In every other
epoch they are also recorded: at each step by mlx (`save_metrics_and_losses`) and by Lightning, every 50th step by the
loop written by hand. All write to TensorBoard every 50th step. The values of mlx and of the loop by hand cover both
workers; those of Lightning cover one worker until the end of the epoch. Medians over epochs of 200 steps, in {rounds}
alternating rounds. Two workers and other processes share two cores, so the difference of two epochs contains the noise
of both. The time in mlx's own calls, measured on rank 0 and including its waiting for others, does not.

{table(["", "step without, ms", "with", "added per step", "in the calls that record"], rows)}

Goal: <= 1.03x.
"""


def _measured(contender: str, folder: Path) -> dict[str, float]:
    out = folder / "measured.json"
    untracked = ["~cfg.trackers.tensorboard"] * (contender == "mlx-untracked")
    command = mlx(*untracked, f"cfg.out={out}") if contender.startswith("mlx") else torchrun(2, contender, out)
    return found_by(command, folder, out, environment(folder))
