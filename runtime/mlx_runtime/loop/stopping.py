"""Early stops of a run, on a request or before a preemption: all workers agree on the step."""

import time
from collections.abc import Callable
from typing import Any

import torch

from mlx_runtime.distributed.collectives import is_alone
from mlx_runtime.distributed.topology import Topology

SECONDS_PER_VOTE = 0.1
"""Time between two rounds. A request waits for up to two of them, or for the next step if steps take longer."""

MAX_STEPS_PER_VOTE = 50
"""Maximum number of steps between two rounds, for loops whose steps suddenly become much slower."""

VOTES_PER_PREEMPTION_CHECK = 10
"""Rounds of the stop consensus per check for preemption; each check is a collective of a few milliseconds."""


class LoopStopped(BaseException):
    """Leaves `worker_loop` after a checkpoint was saved: a stop was requested, or `cfg.max_steps` is reached."""


class StopConsensus:
    """Distributes the requests of any worker to all workers, between steps. Every worker must make the same calls.

    A round is a small collective on the CPU. Its result includes the number of steps until the next round, about
    `SECONDS_PER_VOTE` later, so that all workers take part at the same step. The loop does not wait for the result: it
    is read when the next round is due, unless rounds follow every step.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._group = None if is_alone() else torch.distributed.new_group(backend="gloo")
        self._steps_left = 1
        self.interval = 1  # steps between two rounds
        self._voted_at = time.monotonic()
        self._round: tuple[Any, torch.Tensor] | None = None  # under way

    def due(self) -> bool:
        """Count a step. Return True if a round is due."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def poll(self, request: int) -> int:
        """Begin a round, and return the result of the previous one, or of this one if rounds follow every step."""
        result = self._finish()
        self._begin(request)
        return result if self.interval > 1 else max(result, self._finish())

    def vote(self, request: int) -> int:
        """Return the maximum of the requests of all workers; 0 means none."""
        return max(self.poll(request), self._finish())

    def _begin(self, request: int) -> None:
        now = time.monotonic()
        taken = max(1, self.interval - self._steps_left)  # less than the interval at the end of an epoch
        per_step, self._voted_at = (now - self._voted_at) / taken, now
        interval = int(min(MAX_STEPS_PER_VOTE, max(1.0, SECONDS_PER_VOTE / max(per_step, 1e-9))))
        votes = torch.tensor([request, interval if self._topology.rank == 0 else 0])
        work = None
        if self._group is not None:
            work = torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        self._round, self._steps_left = (work, votes), self.interval

    def _finish(self) -> int:
        """Wait for the round under way, and return its result; 0 if there is none."""
        if self._round is None:
            return 0
        (work, votes), self._round = self._round, None
        if work is not None:
            work.wait()
        request, interval = votes.tolist()
        self._steps_left += interval - self.interval
        self.interval = interval
        return int(request)


class StopPoll:
    """Lets all workers stop at the same step: on a request, or when a node is being preempted.

    Every worker must construct it. `preempted` is a collective; with `resumable_by_fewer`, the run continues with fewer
    workers.
    """

    def __init__(
        self,
        topology: Topology,
        requested: Callable[[], bool] = lambda: False,
        *,
        preempted: Callable[[], bool] | None = None,
        resumable_by_fewer: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.consensus = StopConsensus(topology)
        self._requested, self._ask, self._resumable_by_fewer = requested, preempted, resumable_by_fewer
        self._notice = notice
        self._votes = 0
        self._preempted = False
        self.agreed = False  # all workers have agreed to stop
        self.stopped = False  # the loop was left because of that

    @property
    def interval(self) -> int:
        """Number of steps that take about `SECONDS_PER_VOTE`, the same on all workers."""
        return self.consensus.interval

    def step(self) -> bool:
        """Count a training step, and run a round if one is due. Return True if a node is being preempted."""
        if self.agreed or not self.consensus.due():
            return False
        self.agreed = bool(self.consensus.poll(self._requested()))
        self._votes += 1
        if self._ask is None or self._preempted or self._votes % VOTES_PER_PREEMPTION_CHECK:
            return False
        self._preempted = self._ask()
        if self._preempted:
            then = "the others resume from a checkpoint" if self._resumable_by_fewer else "stopping with a checkpoint"
            self._notice(f"a node of this run is being drained; {then}")
            self.agreed = self.agreed or not self._resumable_by_fewer
        return self._preempted

    def vote(self) -> bool:
        """Return True if any worker was asked to stop."""
        self.agreed = bool(self.consensus.vote(self._requested())) or self.agreed
        return self.agreed
