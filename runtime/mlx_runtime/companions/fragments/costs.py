"""The cost model of plans: memory and time of blocks, of machines that hold them, and of clusters.

A cluster is a pipeline. Its machines, the stages, hold consecutive blocks and send activations forward and gradients
back. A batch passes in microbatches, so a cluster of S stages takes (M + S - 1) / M times as long for it as its
slowest stage, where M is the number of microbatches (GPipe, arXiv 1811.06965). Between the forward and the backward
pass, GPipe sends the outputs of the last stage to all others.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Block:
    """Part of a model that is not cut. Sizes are in bytes, and for one batch."""

    name: str  # path of its module
    parameters: int  # number
    weights: int  # with buffers
    gradients: int = 0
    states: int = 0  # of optimizers
    activations: int = 0  # kept until the backward pass
    sends: int = 0  # to the next block, in the forward pass; of the last block, outputs to each other stage
    returns: int = 0  # from the next block, in the backward pass
    seconds: float = 0  # of the forward and backward pass, at speed 1
    crossing: int = 0  # memory that the next block needs for what this one sends, if another machine has it

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.states + self.activations


@dataclass(frozen=True)
class Machine:
    """A node that can hold blocks."""

    name: str
    memory: float  # bytes
    bandwidth: float = float("inf")  # bytes per second, in each direction
    speed: float = 1.0  # relative to the one on which blocks were measured


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on a machine."""

    machine: Machine
    first: int  # block
    last: int  # block, inclusive
    memory: float  # bytes; on rank 0, with those of checkpoints
    parameters: int
    weights: int  # bytes
    compute_s: float  # of a batch
    transfer_s: float  # to and from the next stage
    outputs_s: float = 0.0  # of the last stage, to all others

    @property
    def busy_s(self) -> float:
        """Seconds of a batch in microbatches, without its outputs."""
        return self.compute_s + self.transfer_s


@dataclass(frozen=True)
class Plan:
    """Clusters, each of which is a pipeline of stages that holds the whole model."""

    blocks: tuple[Block, ...]
    clusters: tuple[tuple[Stage, ...], ...]
    idle: tuple[Machine, ...]
    microbatches: int
    average_every: int

    def step_s(self, cluster: int) -> float:
        """Return the seconds that a cluster takes for a batch, without the averaging of clusters."""
        stages = self.clusters[cluster]
        slowest = max(stage.busy_s for stage in stages)
        return slowest * (self.microbatches + len(stages) - 1) / self.microbatches + stages[-1].outputs_s

    @property
    def outputs_s(self) -> float:
        """Seconds per step for sending outputs to all stages."""
        return max(stages[-1].outputs_s for stages in self.clusters)

    @property
    def average_s(self) -> float:
        """Seconds per step for averaging the weights of clusters in rings, whose slowest machine determines them."""
        others = len(self.clusters) - 1
        slowest = max(stage.weights / stage.machine.bandwidth for stages in self.clusters for stage in stages)
        return 2 * others / (others + 1) * slowest / self.average_every

    @property
    def total_s(self) -> float:
        """Seconds between two steps, if clusters wait for each other."""
        return max(map(self.step_s, range(len(self.clusters)))) + self.average_s

    @property
    def batches_per_s(self) -> float:
        return len(self.clusters) / self.total_s if self.total_s else float("inf")


def roles(stages: int) -> list[str]:
    """Return the role of each stage: the first one reads the rows, and the last one computes the loss."""
    return ["Root", *["Stem"] * (stages - 2), *["Leaf"] * (stages > 1)]


def joined(blocks: Sequence[Block]) -> Block:
    """Return consecutive blocks as one, with the name of the first."""
    added = ("parameters", "weights", "gradients", "states", "activations", "seconds")
    sums = {name: sum(getattr(block, name) for block in blocks) for name in added}
    return replace(blocks[-1], name=blocks[0].name, **sums)


def seconds_of_outputs(blocks: Sequence[Block], machines: Sequence[Machine]) -> float:
    """Return the seconds for sending outputs to all machines; as many as have them send them at a time."""
    rounds = (len(machines) - 1).bit_length()
    return rounds * blocks[-1].sends / min(machine.bandwidth for machine in machines)


def stages_of(blocks: Sequence[Block], machines: Sequence[Machine], starts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages of machines that begin with the given blocks."""
    stages = []
    for index, (machine, first) in enumerate(zip(machines, starts, strict=True)):
        after = starts[index + 1] if index + 1 < len(starts) else len(blocks)
        own, link = blocks[first:after], machine.bandwidth
        moved = 0
        if after < len(blocks):
            link, moved = min(link, machines[index + 1].bandwidth), own[-1].sends + own[-1].returns
        stages.append(
            Stage(
                machine,
                first,
                after - 1,
                sum(block.memory for block in own) + (blocks[first - 1].crossing if first else 0),
                sum(block.parameters for block in own),
                sum(block.weights for block in own),
                sum(block.seconds for block in own) / machine.speed,
                moved / link,
                seconds_of_outputs(blocks, machines) if after == len(blocks) else 0.0,
            )
        )
    return tuple(stages)


class Costs:
    """Seconds of stages: arrays over the first block and the block after the last one; infinite if it does not fit."""

    def __init__(
        self, blocks: Sequence[Block], machines: Sequence[Machine], microbatches: int, collected: float
    ) -> None:
        self.blocks, self.machines, self.microbatches = blocks, machines, microbatches
        self.collected = collected  # bytes that the first machine needs besides those of its stage
        self._memory = np.cumsum([0.0, *(block.memory for block in blocks)])
        self._seconds = np.cumsum([0.0, *(block.seconds for block in blocks)])
        self._crossing = np.array([0.0, *(block.crossing for block in blocks)])
        self._moved = np.array([0.0, *(block.sends + block.returns for block in blocks)])
        self._of_kind: dict[tuple[float, float, float], Floats] = {}

    def compute(self, machine: int) -> Floats:
        """Return the seconds of `[first, after)` on a machine, (blocks, blocks + 1)."""
        kind = self.machines[machine]
        key = (kind.memory, kind.speed, 0.0 if machine else self.collected)
        if key not in self._of_kind:
            total = self._memory[None, :] - self._memory[:-1, None] + self._crossing[:-1, None]
            seconds = (self._seconds[None, :] - self._seconds[:-1, None]) / kind.speed
            fits = (total + key[2] <= kind.memory) & np.triu(np.ones_like(seconds, dtype=bool), 1)
            self._of_kind[key] = np.where(fits, seconds, np.inf)
        return self._of_kind[key]

    def transfer(self, machine: int, following: int) -> Floats:
        """Return the seconds of a cut after each block, (blocks + 1,)."""
        link = min(self.machines[machine].bandwidth, self.machines[following].bandwidth)
        transfer: Floats = self._moved / link
        return transfer

    def before(self, machine: int, following: int, rest: Floats) -> tuple[Floats, np.ndarray[Any, Any]]:
        """Put a machine before others, whose slowest stage takes `rest` from each block on.

        Return the same for all of them, and the block at which the others begin.
        """
        inner = slice(1, len(self.blocks))
        own = self.compute(machine)[:, inner] + self.transfer(machine, following)[inner]
        slowest = np.maximum(own, rest[inner])
        if not slowest.shape[1]:
            return np.full(len(self.blocks), np.inf), np.zeros(len(self.blocks), dtype=int)
        cut = slowest.argmin(axis=1)
        return np.take_along_axis(slowest, cut[:, None], axis=1)[:, 0], cut + 1

    def cut(self, order: Sequence[int]) -> tuple[float, list[int]]:
        """Cut the blocks for machines in this order. Return the seconds of the slowest stage, and the first blocks."""
        rest, cuts = self.compute(order[-1])[:, -1], []
        for machine, following in reversed([*itertools.pairwise(order)]):
            rest, cut = self.before(machine, following, rest)
            cuts.append(cut)
        starts = [0]
        for cut in reversed(cuts):
            starts.append(int(cut[starts[-1]]))
        return float(rest[0]), starts

    def step(self, slowest: float, machines: Sequence[int]) -> float:
        """Return the seconds of a cluster for a batch, given those of its slowest stage."""
        factor = (self.microbatches + len(machines) - 1) / self.microbatches
        return float(slowest) * factor + seconds_of_outputs(self.blocks, [self.machines[item] for item in machines])

    def plan(self, clusters: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Plan:
        """Return the plan of clusters, given as machines in order and the first block of each."""
        stages = []
        for order, starts in clusters:
            found = stages_of(self.blocks, [self.machines[item] for item in order], starts)
            extra = [0.0 if item else self.collected for item in order]
            stages.append(tuple(replace(own, memory=own.memory + more) for own, more in zip(found, extra, strict=True)))
        used = {stage.machine.name for item in stages for stage in item}
        idle = tuple(item for item in self.machines if item.name not in used)
        return Plan(tuple(self.blocks), tuple(stages), idle, self.microbatches, 1)
