"""Agreement of all workers to stop."""

from pathlib import Path

import pytest
from forkserver import Commands
from sessions import ALONE

from mlx_runtime.loop import stopping
from mlx_runtime.loop.stopping import MAX_STEPS_PER_VOTE, VOTES_PER_PREEMPTION_CHECK, StopPoll

pytestmark = pytest.mark.pure


class TestInterval:
    """Number of steps between two rounds."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The current time in seconds."""
        clock = [0.0]
        monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
        return clock

    @staticmethod
    def steps(poll: StopPoll, clock: list[float], seconds: float, most: int = 1000) -> int:
        """Return the number of steps of some duration until a round."""
        before = poll.rounds
        for number in range(1, most + 1):
            clock[0] += seconds
            poll.step()
            if poll.rounds > before:
                return number
        return most

    def test_it_comes_about_as_often_however_long_steps_take(self, clock: list[float]) -> None:
        for seconds, wanted in ((0.01, 10), (0.05, 2), (3.0, 1), (1e-6, MAX_STEPS_PER_VOTE)):
            poll = StopPoll(ALONE, lambda: False)
            assert self.steps(poll, clock, seconds) == 1
            assert self.steps(poll, clock, seconds) == pytest.approx(wanted, abs=1)

    def test_one_that_comes_early_counts_the_steps_that_were_taken(self, clock: list[float]) -> None:
        """As at the end of an epoch, after steps that were slower than the previous ones."""
        poll = StopPoll(ALONE, lambda: False)
        self.steps(poll, clock, 0.002)
        self.steps(poll, clock, 0.045, most=20)
        assert not poll.vote()
        assert self.steps(poll, clock, 0.045) == 2

    def test_the_loop_does_not_wait_for_a_round_unless_steps_are_slow(self, clock: list[float]) -> None:
        requests = [False, True, False]
        poll, found = StopPoll(ALONE, lambda: requests.pop(0)), []
        for _ in range(3):
            self.steps(poll, clock, 0.01)
            found.append(poll.agreed)
        assert found == [False, False, True]
        requests = [False, True]
        poll = StopPoll(ALONE, lambda: requests.pop(0))
        self.steps(poll, clock, 60)
        self.steps(poll, clock, 60)
        assert poll.agreed


STEPS_OF_TWO = """
import os, sys, time, torch
import torch.distributed as dist
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.stopping import StopPoll
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
step = 0
poll = StopPoll(Topology(rank, 2, torch.device("cpu")), lambda: rank == 1 and step >= 30)
while not poll.agreed and step < 1000:
    time.sleep(0.001 * (1 + rank))
    step += 1
    poll.step()
print(step, flush=True)
dist.destroy_process_group()
if rank == 0:
    os.wait()
os._exit(0)  # gloo's threads can abort an interpreter that is finalizing
"""


@pytest.mark.process
def test_all_workers_stop_at_the_same_step(commands: Commands, tmp_path: Path) -> None:
    """Although one is faster, another one was asked, and none waits for the result of a round."""
    done = commands.run(tmp_path, [str(tmp_path / "store")], commands.environment, 120, STEPS_OF_TWO)
    assert done.returncode == 0, done.stderr
    first, second = map(int, done.stdout.split())
    assert first == second
    assert 30 < first <= 30 + 3 * MAX_STEPS_PER_VOTE


class TestPoll:
    """A run stops on request, or because a node is preempted."""

    def test_a_request_is_found_at_the_next_vote_and_stays(self) -> None:
        requests = [True, False]
        poll = StopPoll(ALONE, lambda: requests.pop(0))
        assert not poll.step()
        assert poll.agreed
        assert poll.vote()
        assert not poll.stopped

    def test_a_preempted_node_is_noticed_although_epochs_end_with_a_vote(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stopping, "MAX_STEPS_PER_VOTE", 1)
        poll = StopPoll(ALONE, lambda: False, preempted=lambda: True)
        for _ in range(VOTES_PER_PREEMPTION_CHECK // 2):
            assert not poll.agreed
            poll.step()
            poll.step()
            poll.vote()
        assert poll.agreed

    @pytest.mark.parametrize("fewer", [True, False])
    def test_a_preempted_node_saves_once_and_stops_unless_fewer_workers_can_continue(
        self, fewer: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stopping, "MAX_STEPS_PER_VOTE", 1)
        answers, notices = iter([False]), list[str]()
        poll = StopPoll(
            ALONE, lambda: False, preempted=lambda: next(answers, True), resumable_by_fewer=fewer, notice=notices.append
        )
        saves = [poll.step() for _ in range(3 * VOTES_PER_PREEMPTION_CHECK)]
        assert [number for number, save in enumerate(saves, 1) if save] == [2 * VOTES_PER_PREEMPTION_CHECK]
        assert poll.agreed is not fewer
        then = "the others resume from a checkpoint" if fewer else "stopping with a checkpoint"
        assert notices == [f"a node of this run is being drained; {then}"]
