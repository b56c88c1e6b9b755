"""Objects of `cfg.callbacks` that accompany a run in its driver."""

import json
from pathlib import Path

import pytest
from conftest import Mlx

pytestmark = pytest.mark.process

TOOLS = '''
import contextlib

from mlx_runtime.errors import MlxError
from mlx_runtime.events import Notice


class Heartbeat:
    """Writes each event of a run to a file of its folder."""

    @contextlib.contextmanager
    def accompany(self, run):
        with (run.record.folder.path / "heartbeat.txt").open("w") as file:
            print("claimed as", run.record["status"], file=file)
            run.notify(Notice("heartbeat begins"))
            yield lambda event: print(type(event).__name__, file=file, flush=True)
            run.notify(Notice("heartbeat ends"))
            print("ended as", run.record["status"], file=file)


class Failing:
    """Raises an exception at a given moment of the run."""

    def __init__(self, where: str = "on entry"):
        self.where = where

    @contextlib.contextmanager
    def accompany(self, run):
        if self.where == "on refusal":
            raise MlxError("there is no room for this run")
        self._fail("on entry")
        yield lambda event: self._fail("on events")

    def _fail(self, where):
        if self.where == where:
            raise ZeroDivisionError(where)
'''


@pytest.fixture
def extended(digits: Path) -> Path:
    tools = digits / "src" / "tools.py"
    tools.write_text(tools.read_text() + TOOLS)
    return digits


def command(name: str, *more: str) -> tuple[str, ...]:
    """Return a short run with an extension of src/tools.py."""
    extension = f"+cfg.callbacks.extension._target_=src.tools.{name}"
    return ("train", "run", "cfg.num_epochs=1", "cfg.debug.limit_batches=2", extension, *more)


def test_it_is_with_the_run_from_its_claim_to_its_recorded_end(extended: Path, mlx: Mlx) -> None:
    done = mlx(extended, *command("Heartbeat", "cfg.start_workers=0"))
    written = (extended / "runs/digits/run_001/heartbeat.txt").read_text().split("\n")
    assert written[0].startswith("claimed as ")
    assert written[1] == "RunStarted"
    assert "CheckpointSaved" in written
    assert written[-2:] == ["ended as SUCCEEDED", ""]
    assert done.stdout.index("heartbeat begins") < done.stdout.index("heartbeat ends")


@pytest.mark.parametrize("where", ["on entry", "on events"])
def test_one_that_fails_is_reported_once(extended: Path, mlx: Mlx, where: str) -> None:
    where = f"+cfg.callbacks.extension.where={where}"
    done = mlx(extended, *command("Failing", "cfg.start_workers=0", where))
    text = "Failing failed, the run continues without it: ZeroDivisionError: on "
    assert (done.stdout + done.stderr).count(text) == 1
    assert json.loads((extended / "runs/digits/run_001/run.json").read_text())["status"] == "SUCCEEDED"


def test_one_that_refuses_the_run_fails_it(extended: Path, mlx: Mlx) -> None:
    where = "+cfg.callbacks.extension.where=on refusal"
    done = mlx(extended, *command("Failing", "cfg.start_workers=0", where))
    assert done.returncode == 1
    assert "error: there is no room for this run" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((extended / "runs/digits/run_001/run.json").read_text())["status"] == "FAILED"
