"""Sharded training: the speed of steps, the memory of workers, and checkpoints."""

import json
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from commands import Command, environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, median

TITLE = "Sharding"

CONTENDERS = {
    "plain": "torchrun, `fully_shard`",
    "accelerate": "HF Accelerate, FSDP2",
    "lightning": "Lightning, `ModelParallelStrategy`",
    "mlx": "**mlx**, `cfg.strategy=fsdp`",
}

WORKERS = (1, 2, 4)


@dataclass(frozen=True)
class Work:
    """What a contender does in one run: train a model for some steps with `batch_size` rows per worker, then stop."""

    layers: int
    width: int
    batch_size: int
    steps: int
    workers: int
    checkpoint: bool = False


SMALL = Work(layers=8, width=320, batch_size=4, steps=33, workers=2)
LARGE = {
    workers: Work(layers=14, width=768, batch_size=1, steps=5, workers=workers, checkpoint=workers == 2)
    for workers in WORKERS
}

Found = dict[str, dict[str, float]]


def section(rounds: int, only: Collection[str]) -> str:
    names = list(CONTENDERS)
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "sharding")
        small = alternating(names, only, rounds, lambda name: measured(name, folder, SMALL))
        large = {
            # memory varies by 1 % between runs
            workers: alternating(
                names, only, rounds if work.checkpoint else 1, lambda name, work=work: measured(name, folder, work)
            )
            for workers, work in LARGE.items()
        }
    head = ["", "step", *(f"memory of one of {workers}" if workers > 1 else "memory of one" for workers in WORKERS)]
    rows = []
    for name in small:
        cells = [CONTENDERS[name], _seconds(small, name, "step")]
        for found in large.values():
            own, base = (_median(found, item, "peak_mb", "training") for item in (name, "plain"))
            cells.append(f"{own:,.0f} MB" if name == "plain" else f"{own:,.0f} MB, {own / base:.2f}x")
        rows.append(cells)
    checkpoints = [
        [CONTENDERS[name], *(_seconds(large[2], name, key) for key in ("blocked", "written", "restored"))]
        for name in small
    ]
    return f"""A GPT whose blocks are sharded, float32, Adam, 64 tokens per row.

The step: 10 M parameters, two workers, four rows per worker and step; the median step, in medians of {rounds}
alternating rounds. The peak memory of the worst worker: 100 M parameters, one row per worker and step. It is the peak
of the resident memory (`VmHWM`) without mapped files, minus the private memory just before the model is built, so it
is that of parameters, gradients, moments and activations. Without sharding, the first three alone are
{16 * parameters(LARGE[1]) / 1e6:,.0f} MB.

{table(head, rows)}

A checkpoint of these 100 M parameters and their moments, {12 * parameters(LARGE[2]) / 1e6:,.0f} MB, by two workers:
how long the loop waits, how long it takes until everything is written, and how long to restore it. Plain torch uses
`dcp.async_save` and `dcp.load`; only mlx writes checksums, and verifies them.

{table(["", "the loop waits", "written after", "restored in"], checkpoints)}

Goals: step <= 1.05x plain torch, memory <= 1.1x, the loop waits <= 5 % of the time of writing.
"""


def measured(contender: str, folder: Path, work: Work, *more: str) -> Found:
    """Let a contender do its work, and return its seconds and its peaks of memory. `more` are overrides of mlx."""
    out = folder / "found" / "measured.json"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    rows = work.steps * work.batch_size * work.workers
    own = {"layers": work.layers, "width": work.width}
    data = {"rows": rows, "batch_size": work.batch_size}
    command: Command = torchrun(
        work.workers, contender, json.dumps({**own, **data, "checkpoint": work.checkpoint, "out": str(out)})
    )
    if contender == "mlx":
        command = mlx(
            "cfg.engine=local",
            f"cfg.start_workers={work.workers}",
            f"cfg.storage_path={out.parent}/runs",
            f"cfg.checkpoint={str(work.checkpoint).lower()}",
            f"cfg.out={out}",
            *(f"models.net.{key}={value}" for key, value in own.items()),
            *(f"datasets.train.{key}={value}" for key, value in data.items()),
            *more,
        )
    return found_by(command, folder, out, environment(folder))


def parameters(work: Work) -> int:
    """Return the number of parameters, up to biases and norms: 12 width² per block, and 1,024 tokens twice."""
    return 12 * work.layers * work.width**2 + 2 * 1024 * work.width


def _median(found: dict[str, list[Found]], name: str, kind: str, key: str) -> float:
    return median(item[kind][key] for item in found[name])


def _seconds(found: dict[str, list[Found]], name: str, key: str) -> str:
    """Return the median of a contender, with the ratio to the first one."""
    own, base = (_median(found, item, "seconds", key) for item in (name, "plain"))
    return f"{own:.2f} s" if name == "plain" else f"{own:.2f} s, {own / base:.2f}x"
