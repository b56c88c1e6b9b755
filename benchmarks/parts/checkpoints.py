"""What a checkpoint per epoch costs: epochs with and without one, in turns in the same run."""

import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import environment, found_by, mlx, workplace
from page import row, table
from rounds import median

TITLE = "Checkpoints"


def section(rounds: int, only: Collection[str]) -> str:
    """Rounds make no difference: each of the two runs has turns of its own."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "checkpoints")
        for layers in (1, 4):
            out = folder / "measured.json"
            found = found_by(mlx(f"models.net.layers={layers}", f"cfg.out={out}"), folder, out, environment(folder))
            without, with_one, blocked = (median(found[name]) for name in ("without", "with", "blocked"))
            size = found["parameters"] * 12 / 1e6  # float32: the weights, and two moments of Adam
            cells = [f"{found['parameters'] / 1e6:.1f} M", f"{size:.0f}", f"{without:.1f}"]
            rows.append([*cells, f"{with_one / without:.3f}x", f"{1000 * blocked:.0f} ms"])
            print(row(rows[-1]), flush=True)
    head = ["parameters", "state, MB", "epoch, s", "with a checkpoint", "of it the loop waits"]
    return f"""One checkpoint per epoch of a model with Adam, two workers that keep all cores busy: what is written in
the background is taken from them. Medians of four epochs each.

{table(head, rows)}
"""
