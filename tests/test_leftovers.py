"""Termination of processes that tests leave behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import wait_for

pytestmark = pytest.mark.process

LEAVES_ONE = """
import os, subprocess, time

def test_leaves_a_process():
    subprocess.run("setsid sleep 600 >/dev/null 2>&1 & echo $! > pid.part; mv pid.part pid", shell=True)
    time.sleep(float(os.environ["LASTS_S"]))
"""


def session(folder: Path, environment: dict[str, str], lasts_s: int) -> "subprocess.Popen[str]":
    (folder / "test_it.py").write_text(LEAVES_ONE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "leftovers", "-p", "no:cacheprovider", "-c", "/dev/null"]
    settings = {"PYTHONPATH": str(Path(__file__).parent), "TESTS_ENDING_S": "1", "LASTS_S": str(lasts_s)}
    return subprocess.Popen(
        [*command, "test_it.py"], cwd=folder, env=environment | settings, stdout=subprocess.PIPE, text=True
    )


def running(folder: Path) -> bool:
    command = Path(f"/proc/{(folder / 'pid').read_text().strip()}/cmdline")
    return command.exists() and command.read_bytes() != b""  # which that of a zombie is


def test_what_is_left_fails_the_session_and_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    with session(tmp_path, environment, lasts_s=0) as process:
        output, _ = process.communicate(timeout=120)
    assert f"left behind, and killed: process {(tmp_path / 'pid').read_text().strip()}: sleep 600 (" in output
    assert "started by test_it.py::test_leaves_a_process (call)" in output
    assert "1 passed" in output
    assert process.returncode == 1
    assert not running(tmp_path)


def test_nothing_outlives_a_session_that_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    with session(tmp_path, environment, lasts_s=600) as process:
        wait_for((tmp_path / "pid").exists)
        assert running(tmp_path)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not running(tmp_path), 60)
