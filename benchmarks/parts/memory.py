"""The memory of a worker by size of the model and strategy: the figures of the guide to sharding."""

import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import workplace
from page import table
from rounds import repeated

from parts.sharding import Work, measured

TITLE = "Memory by strategy"

STRATEGIES = {
    "`ddp`": (2, ["cfg.strategy=ddp"]),
    "`fsdp`": (2, []),
    "`fsdp`, activation checkpointing": (2, ["cfg.activation_checkpointing=true"]),
    "`fsdp`, 4 workers": (4, []),
    "`fsdp`, `shard_size=2`, 4 workers": (4, ["cfg.sharding.shard_size=2"]),
}
"""Number of workers, and overrides."""

SIZES = ((8, 320), (9, 512), (14, 768), (24, 1024))
"""Number of blocks, and width."""


def section(rounds: int, only: Collection[str]) -> str:
    """Ignores `rounds` and `only`: the figures vary by 1 % between runs."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "sharding")
        for layers, width in SIZES:
            cells = []
            for workers, overrides in STRATEGIES.values():
                work = Work(layers, width, batch_size=4, steps=2, workers=workers, returns=True)
                found = repeated(lambda _, work=work, own=overrides: measured("mlx", folder, work, *own), "mlx")
                cells.append(f"{found['peak_mb']['training']:,.0f}")
            rows.append([f"{work.parameters / 1e6:.0f} M", f"{16 * work.parameters / 1e6:,.0f}", *cells])
            print(rows[-1], flush=True)
    head = ["parameters", "weights, gradients, moments", *STRATEGIES]
    return f"""MB of the worst of two workers, unless stated otherwise, measured as in the section before: a GPT with
float32 and Adam, and four rows of 64 tokens per worker and step.

{table(head, rows)}
"""
