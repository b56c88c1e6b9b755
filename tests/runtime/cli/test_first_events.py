"""TensorBoard for a run that has written no events yet: it waits for them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_runtime.cli.verbs import xp
from mlx_runtime.companions.ray import remote_job
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """The folder of a run that has a record only."""
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "run.json").write_text("{}")
    yield str(tmp_path)
    signal.signal(signal.SIGTERM, before)


def test_its_events_are_awaited_on_the_cluster(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_job, "DAY_S", 0.05)
    monkeypatch.setattr(remote_job, "MIRROR_S", 0.1)
    remote_job.mirror(run)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for path in (f"file://{tmp_path}/run_002", str(tmp_path / "run_002")):
        with pytest.raises(UsageError, match="there are no runs in"):
            xp.board(path, None, 0)
