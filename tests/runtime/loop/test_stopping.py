"""Agreement of all workers to stop."""

from pathlib import Path

import pytest
from forkserver import Commands
from sessions import ALONE

from mlx_runtime.loop import stopping
from mlx_runtime.loop.stopping import MAX_STEPS_PER_VOTE, VOTES_PER_PREEMPTION_CHECK, StopPoll

pytestmark = pytest.mark.pure


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
