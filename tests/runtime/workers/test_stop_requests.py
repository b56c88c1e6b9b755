"""Requests to end a run: immediately before workers train, after a checkpoint once they train."""

import pytest

from mlx_runtime.errors import RunStopped
from mlx_runtime.workers import stop_requests
from mlx_runtime.workers.stop_requests import StopRequests, Terminated

pytestmark = pytest.mark.pure


def test_workers_that_train_have_time_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts: list[bool] = []
    stop = StopRequests(lambda: interrupts.append(True))
    stop.allow_checkpoint()
    assert not stop.immediate()
    stop.request("SIGTERM")
    stop.request("stop()")
    assert (stop.reason, stop.immediate(), interrupts) == ("SIGTERM", True, [])
    stop.check()
    monkeypatch.setattr(stop_requests, "GRACE_S", 0.0)
    with pytest.raises(Terminated):
        stop.check()


def test_the_request_of_a_user_outweighs_that_of_the_system() -> None:
    """A job that the system stopped begins again elsewhere, and one that a user stopped does not."""
    stop = StopRequests()
    for reason in ("SIGTERM", RunStopped.REQUESTED, "SIGHUP"):
        stop.request(reason)
    assert stop.reason == "mlx xp stop"


def test_a_run_that_was_taken_over_ends_at_once() -> None:
    stop = StopRequests()
    stop.allow_checkpoint()
    stop.taken_over = True
    with pytest.raises(Terminated):
        stop.check()
