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


def test_a_command_exits_like_any_interpreter(commands: Commands, environment: dict[str, str], tmp_path: Path) -> None:
    """Threads end, then callbacks are called, and all that was printed arrives."""
    code = (
        "import atexit, os, sys, threading, time\n"
        "atexit.register(print, 'callback', end='')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread', os.getpgid(0) == os.getpid()))).start()\n"
        "sys.exit({})"
    )
    for status, expected in ((3, (3, "")), (None, (0, "")), ("'why'", (1, "why\n"))):
        done = commands.run(tmp_path, [], environment, 60, code.format(status))
        assert (done.returncode, done.stderr, done.stdout) == (*expected, "thread True\ncallback")
    failed = commands.run(tmp_path, [], environment, 60, "raise ValueError('why')")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ValueError: why")
