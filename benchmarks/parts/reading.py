"""The speed of reading datasets, with and without a model."""

import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import BIN, environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Reading data"

CONTENDERS = {
    "torchrun": "torchrun, DDP, DataLoader",
    "torchrun-2": "the same, `num_workers=2`",
    "torchrun-batched": "the same, `BatchSampler` and `batch_size=None`",
    "accelerate": "HF Accelerate",
    "lightning": "Lightning, `barebones`",
    "mlx": "**mlx**",
    "mlx-prepared": "**mlx, prepared**",
}

GOALS = {"mlx": {"32": 1.0, "256": 1.0, "1024": 1.0}, "mlx-prepared": {"256": 1.5, "1024": 2.5}}
"""Least ratio by batch size."""


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "input")
        subprocess.run([BIN / "mlx", "train", "prepare"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = alternating(list(CONTENDERS), only, rounds, lambda contender: _measured(contender, folder))
    return f"""Samples per second of both workers, per batch size. 50,000 rows of 32 float32, and 20,000 images of
3 x 32 x 32 bytes, from memory; the model is an MLP with one hidden layer of 64. All read the same datasets, in a new
order each epoch, mlx with its local engine. Medians of {rounds} alternating rounds, with the least and the greatest
ratio; differences under 1.3x with a model are noise. `BatchSampler` passes a whole batch of indices to `__getitem__`,
which only datasets like these tensors can take.

{_table(found)}

Goals: mlx >= 1.0x everywhere; prepared >= 1.5x at 256 and >= 2.5x at 1024.
Without a model, a step of 32 rows takes 0.15 ms, and mlx adds about 0.02 ms: it counts steps and rows, and every 50
steps the workers exchange metrics, for which one waits for the other. With a model, the difference is noise.
"""


def _measured(contender: str, folder: Path) -> dict:
    out = folder / f"{contender}.json"
    prepared = "auto" if contender == "mlx-prepared" else "never"
    ours = mlx("cfg.engine=local", f"cfg.preparation.mode={prepared}", f"cfg.out={out}")
    command = ours if contender.startswith("mlx") else torchrun(2, contender, out)
    return found_by(command, folder, out, environment(folder))


def _table(found: dict[str, list[dict]]) -> str:
    """Return a table with the samples per second of the first contender, and the ratios of the others to it."""
    rates = {
        contender: {case: [item["samples_per_s"][case] for item in measured] for case in measured[0]["samples_per_s"]}
        for contender, measured in found.items()
    }
    base = rates["torchrun"]
    kinds = list(dict.fromkeys(case.rsplit(" ", 1)[0] for case in base))
    sizes = list(dict.fromkeys(case.rsplit(" ", 1)[1] for case in base))
    titles = [kind.replace(" none", ", no model").replace(" mlp", ", MLP") for kind in kinds]
    rows = []
    for contender, measured in found.items():
        goals, cells = GOALS.get(contender, {}), []
        for kind in kinds:
            cases = [(size, rates[contender].get(f"{kind} {size}"), base[f"{kind} {size}"]) for size in sizes]
            ratios = [compared(own, first, at_least=goals.get(size, 0.0)) if own else "-" for size, own, first in cases]
            absolute = " / ".join(f"{median(first) / 1000:,.0f}k" for _, _, first in cases)
            cells.append(f"{absolute} samples/s" if contender == "torchrun" else " / ".join(ratios))
        memory = [item["memory_mb"] for item in measured]
        cells.append(" / ".join(f"{median(item[key] for item in memory):,.0f}" for key in memory[0]))
        rows.append([CONTENDERS[contender], *cells])
    heads = [f"{title}<br>{' / '.join(sizes)}" for title in titles]
    return table(["", *heads, "memory per worker, MB<br>its own / its share / resident"], rows)
