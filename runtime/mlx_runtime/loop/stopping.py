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


class StopPoll:
    """Lets all workers stop at the same step: on a request, or when a node is being preempted.

    A round is a small collective on the CPU. Its result includes the number of steps until the next round, about
    `SECONDS_PER_VOTE` later, so that all workers take part at the same step. The loop does not wait for the result: it
    is read when the next round is due, unless rounds follow every step.

    Every worker must construct it, and make the same calls. `preempted` is a collective; with `resumable_by_fewer`, the
    run continues with fewer workers.
    """

    def __init__(
        self,
        topology: Topology,
        requested: Callable[[], bool],
        *,
        preempted: Callable[[], bool] | None = None,
        resumable_by_fewer: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._rank, self._requested, self._notice = topology.rank, requested, notice
        self._ask, self._resumable_by_fewer = preempted, resumable_by_fewer
        self._group = None if is_alone() else torch.distributed.new_group(backend="gloo")
        self._round: tuple[Any, torch.Tensor] | None = None  # under way
        self.rounds = 0  # begun by `step` so far
        self._sent_at = time.monotonic()
        self._steps_left = 1  # until the next round
        self.interval = 1  # steps between two rounds, the same on all workers
        self.agreed = False  # all workers have agreed to stop
        self.stopped = False  # the loop was left because of that

    def step(self) -> bool:
        """Count a training step, and run a round if one is due. Return True if a node is being preempted."""
        self._steps_left -= 1
        if self.agreed or self._steps_left > 0:
            return False
        self._poll()
        self.rounds += 1
        if self._ask is None or self.rounds % VOTES_PER_PREEMPTION_CHECK or not self._ask():
            return False
        self._ask = None
        then = "the others resume from a checkpoint" if self._resumable_by_fewer else "stopping with a checkpoint"
        self._notice(f"a node of this run is being drained; {then}")
        self.agreed = self.agreed or not self._resumable_by_fewer
        return True

    def vote(self) -> bool:
        """Return True if any worker was asked to stop."""
        self._poll()
        self._receive()
        return self.agreed

    def _poll(self) -> None:
        """Begin a round after receiving the previous one; receive this one, too, if rounds follow every step."""
        self._receive()
        self._send()
        if self.interval == 1:
            self._receive()

    def _send(self) -> None:
        now = time.monotonic()
        taken = max(1, self.interval - self._steps_left)  # less than the interval at the end of an epoch
        per_step, self._sent_at = (now - self._sent_at) / taken, now
        interval = int(min(MAX_STEPS_PER_VOTE, max(1.0, SECONDS_PER_VOTE / max(per_step, 1e-9))))
        votes = torch.tensor([self._requested(), interval if self._rank == 0 else 0])
        work = None
        if self._group is not None:
            work = torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        self._round, self._steps_left = (work, votes), self.interval

    def _receive(self) -> None:
        """Wait for the round under way, if there is one."""
        if self._round is None:
            return
        (work, votes), self._round = self._round, None
        if work is not None:
            work.wait()
        request, interval = votes.tolist()
        self._steps_left += interval - self.interval
        self.interval = interval
        self.agreed = self.agreed or bool(request)
