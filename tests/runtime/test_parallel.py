"""What one worker knows of its group."""

import pytest
import torch

from mlx_runtime import parallel
from mlx_runtime.parallel import Vote, Worker

pytestmark = pytest.mark.pure


class TestVote:
    """How many steps pass between two votes."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The present, in seconds."""
        clock = [0.0]
        monkeypatch.setattr(parallel.time, "monotonic", lambda: clock[0])
        return clock

    @staticmethod
    def steps(vote: Vote, clock: list[float], seconds: float, most: int = 1000) -> int:
        """Steps of so many seconds until the vote is due."""
        for number in range(1, most + 1):
            clock[0] += seconds
            if vote.due():
                return number
        return most

    def test_it_comes_about_as_often_however_long_steps_take(self, clock: list[float]) -> None:
        for seconds, wanted in ((0.02, 10), (0.1, 2), (3.0, 1), (1e-6, parallel.MOST_STEPS_PER_VOTE)):
            vote = Vote(Worker(0, 1, torch.device("cpu")))
            self.steps(vote, clock, seconds)
            vote.ask(0)
            assert self.steps(vote, clock, seconds) == pytest.approx(wanted, abs=1)

    def test_one_that_comes_early_counts_the_steps_that_were_taken(self, clock: list[float]) -> None:
        """As at the end of an epoch, after steps that were slower than those before."""
        vote = Vote(Worker(0, 1, torch.device("cpu")))
        self.steps(vote, clock, 0.002)
        vote.ask(0)
        self.steps(vote, clock, 0.09, most=20)
        assert vote.ask(1) == 1
        assert self.steps(vote, clock, 0.09) == 2
