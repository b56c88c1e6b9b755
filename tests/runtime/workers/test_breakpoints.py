"""`breakpoint()` in user code: the progress bar makes room for the debugger, and workers print how to debug instead."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Mlx, edit

pytestmark = pytest.mark.process

IGNORED = "breakpoint() is ignored: workers have no terminal; to debug, add cfg.start_workers=0\n"


@pytest.fixture
def broken(digits: Path) -> Path:
    """The template's experiment with a breakpoint in its training step."""
    step = "self.backward(loss)"
    edit(digits / "src/experiment.py", step, f"{step}\n            if batch_idx == 3: breakpoint()")
    return digits


def test_the_debugger_has_the_terminal_for_itself(broken: Path, environment: dict[str, str]) -> None:
    here, there = pty.openpty()
    command = [sys.executable, "-m", "mlx_runtime", "train", "run", "cfg.start_workers=0", "cfg.num_epochs=1"]
    settings = environment | {"TERM": "xterm-256color", "COLUMNS": "100"}
    streams = {"stdin": there, "stdout": there, "stderr": there}
    with subprocess.Popen(command, cwd=broken, env=settings, **streams, start_new_session=True) as process:
        os.close(there)
        said, answers = b"", [b"p 'batch', batch_idx\n", b"c\n"]
        try:
            while piece := os.read(here, 4096):
                said += piece
                if answers and said.count(b"(Pdb) ") == 3 - len(answers):
                    os.write(here, answers.pop(0))
        except OSError:  # the other end is closed
            pass
    os.close(here)
    assert process.returncode == 0, said.decode()
    before, _, after = said.decode().partition("(Pdb) ")
    assert "━" in before
    assert re.search(r"> \S+src/experiment\.py\(\d+\)train\(\)", before)  # the current line of the user's code
    assert "('batch', 3)" in after
    assert "━" not in after
    assert re.search(r"^.*  1/1 +\d", after, re.MULTILINE)


@pytest.mark.local
def test_workers_say_so_once_and_go_on(broken: Path, mlx: Mlx) -> None:
    done = mlx(broken, "train", "run", "cfg.start_workers=2", "cfg.num_epochs=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(IGNORED) == 1
    assert "(Pdb)" not in done.stdout
