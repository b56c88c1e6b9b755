"""What recording metrics costs: epochs with and without it, in turns in the same run."""

import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, median

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
        ratio = median(item["on"] / item["off"] for item in measured)
        more = median(item["on"] - item["off"] for item in measured)
        inside = median(item["inside"] for item in measured)
        own = f"{1e6 * inside:.0f} µs" if contender.startswith("mlx") else ""
        rows.append([CONTENDERS[contender], f"{1000 * without:.2f}", f"{ratio:.3f}x", f"{1e6 * more:.0f} µs", own])
    return f"""Four metrics and two losses of TorchMetrics see every batch, in all epochs. In every other one they are
also recorded: with mlx by `save_metrics_and_losses` at each step, and so by Lightning; by hand every 50th step. All
write to TensorBoard every 50th step; the values of mlx and of the loop by hand are over both workers, those of
Lightning over one, until the epoch's end. Medians over epochs of 200 steps, in {rounds} alternating rounds; two workers
and what else runs beside them share two cores, so that the difference of two epochs has the noise of both, and the time
in mlx's own calls, of rank 0 with its waiting for others, has not.

{table(["", "a step without, ms", "with", "more per step", "in the calls that record"], rows)}
"""


def _measured(contender: str, folder: Path) -> dict[str, float]:
    out = folder / "measured.json"
    untracked = ["~cfg.trackers.tensorboard"] * (contender == "mlx-untracked")
    command = mlx(*untracked, f"cfg.out={out}") if contender.startswith("mlx") else torchrun(2, contender, out)
    return found_by(command, folder, out, environment(folder))
