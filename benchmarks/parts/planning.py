"""Fragments on ten unequal clusters: the plans of `clusterize` against equal cuts, by the planner's cost model."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

import torch
from page import table
from torch import nn

from mlx_runtime.companions.fragments.costs import Block, Machine, stages_of
from mlx_runtime.companions.fragments.planning import plan
from mlx_runtime.companions.fragments.tracing import trace

TITLE = "Plans of fragments"

MICROBATCHES = 8
FLOP_PER_S = 50e9  # of a machine with speed 1, so that the figures are the same everywhere


def section(rounds: int, only: Collection[str]) -> str:
    """Ignores `rounds`: nothing is timed."""
    models = {"transformer, 52 M": transformer(), "CNN, 9 M": cnn()}
    rows, gains = [], []
    for seed in range(10):
        name = list(models)[seed % 2]
        blocks = models[name]
        machines = nodes(seed, sum(block.memory for block in blocks))
        planned = plan(blocks, machines, microbatches=MICROBATCHES, clusters=1)
        equal = step(blocks, machines, [1.0] * len(machines))
        by_ram = step(blocks, machines, [machine.memory for machine in machines])
        gains += [cut[0] / planned.total_s for cut in (equal,) if not cut[1]]
        sizes = ", ".join(f"{machine.memory / 1e9:.1f}" for machine in machines)
        links = ", ".join(f"{machine.bandwidth * 8 / 1e6:.0f}" for machine in machines)
        speeds = ", ".join(f"{machine.speed:g}" for machine in machines)
        found = f"{planned.total_s:.2f} s" + (f", {len(planned.idle)} idle" if planned.idle else "")
        rows.append([name, sizes, links, speeds, _cell(*equal), _cell(*by_ram), found])
    gains.sort()
    return f"""Seconds per step of one cluster, whose nodes differ in memory, bandwidth and speed (drawn from fixed
seeds), by the cost model of the planner: {MICROBATCHES} microbatches, times from FLOPs at {FLOP_PER_S / 1e9:.0f}
GFLOP/s for speed 1. Equal cuts give all nodes the same number of parameters, in the order in which nodes are listed, as
Ravnest does; cuts by RAM give it parameters in proportion to its memory. Neither knows speeds.

{table(["", "GB", "Mbps", "speed", "equal cuts", "by RAM", "`mlx train clusterize`"], rows)}

Equal cuts fit in {len(gains)} of 10 clusters. There, they take {gains[0]:.1f} to {gains[-1]:.1f} times as long as the
plan, {median(gains):.1f} times in the median.
"""


def _cell(seconds: float, lacking: int) -> str:
    return "does not fit" if lacking else f"{seconds:.2f} s"


def step(blocks: Sequence[Block], machines: Sequence[Machine], shares: Sequence[float]) -> tuple[float, int]:
    """Return the seconds of a step with parameters cut by shares, and the number of nodes with too little memory."""
    ends = list(accumulate(block.parameters for block in blocks))
    targets = [ends[-1] * part / sum(shares) for part in accumulate(shares)]
    starts = [0]
    for index, target in enumerate(targets[:-1]):
        nearest = min(range(len(ends)), key=lambda end: abs(ends[end] - target))
        left = len(machines) - index - 1
        starts.append(min(max(nearest + 1, starts[-1] + 1), len(blocks) - left))
    stages = stages_of(blocks, machines, starts)
    slowest = max(stage.compute_s + stage.transfer_s for stage in stages)
    lacking = sum(stage.memory > stage.machine.memory for stage in stages)
    return slowest * (MICROBATCHES + len(stages) - 1) / MICROBATCHES, lacking


def nodes(seed: int, needed: int) -> list[Machine]:
    """Return 3 to 8 unequal nodes, which can hold the model together."""
    draw = random.Random(seed)
    while True:
        count, room = draw.randint(3, 8), draw.choice([1.6, 3])
        made = [
            Machine(
                f"node_{index}",
                room * needed / count * draw.uniform(0.4, 2),
                draw.choice([20, 100, 1000]) * 1e6 / 8,
                draw.choice([0.5, 1.0, 2.0, 4.0]),
            )
            for index in range(count)
        ]
        if sum(machine.memory for machine in made) > 1.3 * needed:
            return made


def transformer() -> list[Block]:
    width, words = 512, 16_000

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(12)
            )
            self.head = nn.Linear(width, words)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            found: torch.Tensor = self.head(x)
            return found

    return _blocks(Model, lambda: torch.zeros(16, 128, dtype=torch.long, device="meta"))


def cnn() -> list[Block]:
    """Return a model whose first blocks have many activations, and whose last ones have many parameters."""

    def model() -> nn.Module:
        widths = (3, 64, 64, 128, 128, 256, 256, 512, 512, 512)
        layers: list[nn.Module] = []
        for index, (before, width) in enumerate(pairwise(widths)):
            layers.append(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, stride=1 + (index % 2 == 0 and index > 0), padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
            )
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

    return _blocks(model, lambda: torch.zeros(32, 3, 96, 96, device="meta"))


def _blocks(make: Callable[[], nn.Module], rows: Callable[[], torch.Tensor]) -> list[Block]:
    """Return the blocks of a model without memory, with times that are the same on every machine."""
    with torch.device("meta"):
        model = make()
    blocks = trace(model, (rows(),), optimizers=[torch.optim.Adam(model.parameters())]).blocks
    blocks[-1] = replace(blocks[-1], sends=0)  # equal cuts would send the same outputs
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(rows())
    scale = 3 * counter.get_total_flops() / FLOP_PER_S / sum(block.seconds for block in blocks)
    return [replace(block, seconds=block.seconds * scale) for block in blocks]
