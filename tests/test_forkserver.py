"""Tests of the server that runs commands."""

from pathlib import Path

import pytest
from forkserver import Commands

pytestmark = pytest.mark.process


def test_it_can_be_forked_safely(commands: Commands, environment: dict[str, str], tmp_path: Path) -> None:
    """It has a single thread, besides one of Arrow's memory allocator, which handles forks."""
    assert commands.run(tmp_path, ["--version"], environment, 60).returncode == 0
    assert commands.threads is not None
    assert set(commands.threads) <= {"jemalloc_bg_thd"}


def test_commands_run_side_by_side(commands: Commands, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "experiment.py").write_text("import time\n\ntime.sleep(60)\n")
    slow = commands.start(tmp_path, ["train", "bind"], environment)
    quick = commands.run(tmp_path, ["train", "run", "--nonsense"], environment, 60)
    assert (quick.returncode, slow.poll()) == (2, None)
    slow.kill()
    assert slow.wait(10) == -9
