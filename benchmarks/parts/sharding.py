"""Sharded training: the speed of steps, the memory of workers, and checkpoints."""

import json
import math
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from commands import Command, environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Sharding"

CONTENDERS = {
    "plain": "torchrun, `fully_shard`",
    "accelerate": "HF Accelerate, FSDP2",
    "lightning": "Lightning, `ModelParallelStrategy`",
    "mlx": "**mlx**, `cfg.strategy=fsdp`",
}


@dataclass(frozen=True)
class Work:
    """What a contender does in one run.

    Attributes:
        layers: number of blocks.
        width: width of the model.
        batch_size: rows per worker and step.
        steps: number of steps.
        workers: number of workers.
        checkpoint: save and restore checkpoints after the steps.
        returns: give freed memory back to the kernel immediately, so that the peak is that of memory in use.
    """

    layers: int
    width: int
    batch_size: int
    steps: int
    workers: int
    checkpoint: bool = False
    returns: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters, up to biases and norms: 12 width² per block, and 1,024 tokens twice."""
        return 12 * self.layers * self.width**2 + 2 * 1024 * self.width


SMALL = Work(layers=8, width=320, batch_size=4, steps=33, workers=2)
LARGE = Work(layers=14, width=768, batch_size=1, steps=3, workers=2)
MEMORY = {
    **{str(workers): replace(LARGE, workers=workers, returns=True) for workers in (1, 2, 4)},
    "2, as it is": LARGE,
}

Found = dict[str, dict[str, float]]


def section(rounds: int, only: Collection[str]) -> str:
    names = list(CONTENDERS)
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "sharding")
        of = lambda work: lambda name: measured(name, folder, work)
        small = alternating(names, only, rounds, of(SMALL))
        stored = alternating(names, only, rounds, of(replace(LARGE, checkpoint=True)))
        memory = {title: alternating(names, only, 1, of(work)) for title, work in MEMORY.items()}  # varies by 1 %
    steps = [
        [CONTENDERS[name], _seconds(small, name, "step"), *(_peak(found, name) for found in memory.values())]
        for name in small
    ]
    checkpoints = [
        [
            CONTENDERS[name],
            _seconds(stored, name, "blocked") + _waiting(stored, name),
            *(_seconds(stored, name, key) for key in ("written", "restored")),
        ]
        for name in small
    ]
    return f"""A GPT whose blocks are sharded, with float32 and Adam. The step is the median one with
{SMALL.parameters / 1e6:.0f} M parameters, two workers, and four rows of 64 tokens per worker and step, in medians of
{rounds} alternating rounds.

Memory is the peak of the worst worker with {LARGE.parameters / 1e6:.0f} M parameters, and one row per worker and step:
that of the resident memory (`VmHWM`) without mapped files, minus what was private just before the model was built.
Without sharding, weights, gradients and moments alone are {16 * LARGE.parameters / 1e6:,.0f} MB. The allocator of glibc
keeps most of what is freed, so `MALLOC_MMAP_THRESHOLD_=1000000` makes it give memory back, except in the last column.

{table(["", "step", *(f"MB, workers: {title}" for title in memory)], steps)}

A checkpoint of these parameters and their moments, {12 * LARGE.parameters / 1e6:,.0f} MB, by two workers: how long
the loop waits, when everything is written, and how long it takes to restore. Plain torch uses `dcp.async_save` and
`dcp.load`. Only mlx writes checksums, and verifies them. Medians of {rounds} alternating rounds.

{table(["", "the loop waits", "written after", "restored in"], checkpoints)}

Goals: step <= 1.05x plain torch, memory <= 1.1x, the loop waits <= 5 % of the time of writing. The loop waits for
a copy of the state, which training changes afterwards; plain torch's `async_save` waits as long for the same copy.
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
    variables = environment(folder) | ({"MALLOC_MMAP_THRESHOLD_": "1000000"} if work.returns else {})
    return found_by(command, folder, out, variables)


def _seconds(found: dict[str, list[Found]], name: str, key: str) -> str:
    """Return the median of a contender, with the ratio to the first one."""
    own, base = ([item["seconds"][key] for item in found[title]] for title in (name, "plain"))
    goal = 1.05 if (name, key) == ("mlx", "step") else math.inf
    return f"{median(own):.2f} s" + ("" if name == "plain" else f", {compared(own, base, at_most=goal)}")


def _waiting(found: dict[str, list[Found]], name: str) -> str:
    """Return how much of the time of writing the loop waits."""
    share = median(item["seconds"]["blocked"] / item["seconds"]["written"] for item in found[name])
    return f", {100 * share:.0f} % of writing" + (" **missed**" if name == "mlx" and share > 0.05 else "")


def _peak(found: dict[str, list[Found]], name: str) -> str:
    """Return the peak of a contender's memory, with the ratio to the first one."""
    own, base = ([item["peak_mb"]["training"] for item in found[title]] for title in (name, "plain"))
    goal = 1.1 if name == "mlx" else math.inf
    return f"{median(own):,.0f}" + ("" if name == "plain" else f", {compared(own, base, at_most=goal)}")
