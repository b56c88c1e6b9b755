"""Pipelines, DDP and FSDP2 over slow links: the machines are network namespaces of this one."""

import json
import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from commands import workplace
from networks import Network, network, train
from page import table
from rounds import alternating, median

from parts.sharding import Work

TITLE = "Slow links"

SPEEDS = (None, 1000, 100, 20)
"""Mbit/s of each link in each direction. Those up to 100 are measured in the first round only."""

BATCH, WARM = 8, 3
"""Rows per step, of all workers together, and steps that are not measured."""

SIZES = ((12, 256), (12, 448), (14, 768))
"""Number of blocks, and width."""

CONTENDERS = {
    "ddp": ("`ddp`, 2 workers", 2, ("cfg.strategy=ddp",)),
    "fsdp": ("`fsdp`, 2 workers", 2, ("cfg.strategy=fsdp",)),
    "pipeline": ("`pipeline`, 2 stages", 2, ("cfg.strategy=pipeline",)),
    "pipeline-3": ("`pipeline`, 3 stages", 3, ("cfg.strategy=pipeline",)),
}
"""Titles, numbers of workers, and overrides."""

SENT = {"ddp": 4, "fsdp": 8}
"""Bytes per parameter that a worker sends in a step, as measured."""


@dataclass
class Found:
    """Measurements of a run.

    Attributes:
        steps: seconds of the steps at each speed.
        peaks: MB of each rank.
        sent: MB that each machine has sent per step.
        loads: load of this machine before and after the run.
    """

    steps: list[list[float]]
    peaks: list[float]
    sent: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


def section(rounds: int, only: Collection[str]) -> str:
    if os.geteuid():
        print(f"{TITLE}: not measured, because network namespaces need root")
        return ""
    sizes = {f"{Work(*size, BATCH, 0, 2).parameters / 1e6:.0f} M": size for size in SIZES}
    contenders = {f"{name} {size}": (name, size) for size in sizes for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="bench-") as parent, ExitStack() as stack:
        folder = workplace(Path(parent), "sharding")
        machines = stack.enter_context(network(max(workers for _, workers, _ in CONTENDERS.values())))
        seen: dict[str, int] = {}

        def measured(contender: str) -> Found:
            name, size = contenders[contender]
            speeds = SPEEDS[:2] if contender in seen else SPEEDS
            found = run_on(machines, folder, name, sizes[size], speeds)
            seen[contender] = 1
            return found

        found = alternating(list(contenders), only, rounds, measured)
    rows = []
    for contender, runs in found.items():
        name, size = contenders[contender]
        base = found.get(f"ddp {size}")
        cells = []
        for place in range(len(SPEEDS)):
            seconds = _step(runs, place)
            ratio = f", {seconds / _step(base, place):.2f}x" if base and base is not runs else ""
            cells.append(f"{seconds:.2f} s{ratio}")
        peak = " / ".join(f"{item:,.0f}" for item in runs[0].peaks)
        rows.append([size, CONTENDERS[name][0], peak, f"{max(runs[0].sent):,.1f}", *cells])
    absent = [contender for contender in contenders if contender not in found]
    left_out = f"\nNot measured: {', '.join(absent)}.\n" if absent else ""
    loads = sorted(item for runs in found.values() for run in runs for item in run.loads)
    titles = [f"{speed} Mbit/s" if speed else "unlimited" for speed in SPEEDS]
    head = ["parameters", "", "MB per rank", "MB sent per step", *titles]
    return f"""A GPT with float32 and Adam, and {BATCH} rows of 64 tokens per step, over machines in network
namespaces with torchrun: one worker with one thread on each. Pipelines split the rows into 4 microbatches,
the others between workers. Links have the given speed in both directions, and no latency. They are limited after {WARM}
steps, so that figures exclude the start, in which weights are sent. Steps are medians of up to 5 at each speed, fewer
where they take long, and one where they take minutes; without a limit and at 1000 Mbit/s in medians of up to {rounds}
alternating rounds. Ratios are to `ddp`. Memory is the peak as in *Sharding*, also with
`MALLOC_MMAP_THRESHOLD_=1000000`. What is sent is counted at the links, for the machine that sends most.

{table(head, rows)}

The load of the machine was {median(loads):.0f} in the median ({loads[0]:.0f}-{loads[-1]:.0f}), by these and other
processes. Steps of pipelines, and those of others over fast links, vary with the load; most of what DDP and FSDP take
over slow links are transfers. Three stages share two cores, so that only their memory and transfers are those of three
machines.
{left_out}"""


def _step(runs: Sequence[Found], place: int) -> float:
    return median(median(run.steps[place]) for run in runs if place < len(run.steps))


def _counts(name: str, parameters: float, speeds: Sequence[int | None]) -> list[int]:
    """Return the number of steps at each speed: as many as take a minute, but 1 to 5."""
    mbit = 8 * SENT.get(name, 0) * parameters / 1e6
    return [max(1, min(5, int(60 / max(1, mbit / speed if speed else 0)))) for speed in speeds]


def run_on(machines: Network, folder: Path, name: str, size: tuple[int, int], speeds: Sequence[int | None]) -> Found:
    """Train on machines whose links get slower in the course of the run."""
    _, workers, overrides = CONTENDERS[name]
    work = Work(*size, BATCH, 0, workers)
    counts = _counts(name, work.parameters, speeds)
    waits = [WARM + sum(counts[: place + 1]) for place in range(len(counts) - 1)]
    for number in range(workers):
        machines.limit(number, None)
    found = Found([], [], loads=[os.getloadavg()[0]])
    sent: list[list[int]] = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        out = Path(parent) / "measured.json"
        marker = out.with_suffix(".waits")

        def slow_down(printed: str) -> None:
            """Set the next speed whenever the run waits."""
            if marker.exists():
                sent.append(machines.sent())
                for number in range(workers):
                    machines.limit(number, speeds[len(sent)])
                marker.unlink()

        settings = (
            *(f"cfg.storage_path={parent}/runs", f"cfg.out={out}", f"cfg.waits={waits}", "cfg.trackers={}"),
            *(f"models.net.layers={work.layers}", f"models.net.width={work.width}"),
            f"datasets.train.rows={BATCH * (WARM + sum(counts))}",
            f"datasets.train.batch_size={BATCH if 'pipeline' in name else BATCH // workers}",
        )
        returns = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
        train(machines, workers, folder, [*overrides, *settings], slow_down, returns)
        written = json.loads(out.read_text())
    found.loads.append(os.getloadavg()[0])
    found.steps = [written["steps"][0][WARM - 1 :], *written["steps"][1:]]
    found.peaks = [item["training"] for item in written["peaks_mb"]]
    if len(sent) > 1:
        found.sent = [(after - before) / counts[1] / 1e6 for before, after in zip(*sent[:2], strict=True)]
    return found
