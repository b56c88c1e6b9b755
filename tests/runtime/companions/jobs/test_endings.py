"""The rule for what follows the end of a driver."""

import pytest

from mlx_runtime.companions.jobs.endings import DriverEnd

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("end", "following"),
    [
        (DriverEnd(-9, "RUNNING"), "retry"),
        (DriverEnd(-9, "PENDING"), "retry"),  # before it has claimed the run
        (DriverEnd(1, "RUNNING"), "retry"),  # it could not record its end
        (DriverEnd(-2, "RUNNING"), "done"),
        (DriverEnd(-11, "SUCCEEDED"), "done"),  # a crash of the interpreter's exit
        (DriverEnd(1, "FAILED"), "done"),
        (DriverEnd(1, "PENDING"), "done"),  # a ConfigError
        (DriverEnd(130, "STOPPED", saved=True), "done"),
        (DriverEnd(143, "STOPPED", "SIGTERM", saved=True), "requeue"),
        (DriverEnd(143, "STOPPED", None, saved=True), "requeue"),  # a node was drained
        (DriverEnd(143, "STOPPED", "SIGTERM"), "retry"),  # before it had progressed
        (DriverEnd(143, "STOPPED", "mlx xp stop", saved=True), "done"),
        (DriverEnd(143, "RUNNING", None, saved=True), "done"),
    ],
)
def test_deaths_are_retried_and_preempted_runs_requeued(end: DriverEnd, following: str) -> None:
    assert end.next == following
