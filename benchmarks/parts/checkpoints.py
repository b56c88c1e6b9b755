"""The cost of a checkpoint per epoch: epochs with and without one, alternating within one run."""

import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import environment, found_by, mlx, workplace
from page import row, table
from rounds import compared, median

TITLE = "Checkpoints"


def section(rounds: int, only: Collection[str]) -> str:
    """Ignores `rounds`: each of the two runs alternates by itself."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "checkpoints")
        for layers in (1, 4):
            out = folder / "measured.json"
            found = found_by(mlx(f"models.net.layers={layers}", f"cfg.out={out}"), folder, out, environment(folder))
            without, blocked = median(found["without"]), median(found["blocked"])
            size = found["parameters"] * 12 / 1e6  # float32: the weights and the two moments of Adam
            cells = [f"{found['parameters'] / 1e6:.1f} M", f"{size:.0f}", f"{without:.1f}"]
            ratio = compared(found["with"], found["without"], at_most=1.01, digits=3)
            rows.append([*cells, ratio, f"{1000 * blocked:.0f} ms"])
            print(row(rows[-1]), flush=True)
    head = ["parameters", "state, MB", "epoch, s", "with a checkpoint", "blocking the loop"]
    return f"""One checkpoint per epoch of a model with Adam. Two workers keep all cores busy, so writing in the
background slows them down. Medians of four epochs each, with the minimum and maximum ratio of two epochs.

{table(head, rows)}

Goal: <= 1.01x.
The ratios of two epochs scatter by 10 to 30 %, so four of them cannot tell 1.07x from 1.00x. The loop itself waits for
10 to 30 ms.
"""
