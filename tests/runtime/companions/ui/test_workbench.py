"""Code of a project runs in processes of its own, which can neither stop nor change the one that calls it."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import wait_for

from mlx_runtime.companions.ui import workbench
from mlx_runtime.companions.ui.workbench import NoAnswerError, call
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.process

CODE = """
import os, pathlib, sys, time

IMPORTED_IN = os.getcwd()

class Endless:
    def __init__(self):
        time.sleep(1000)

def size(rows):
    return {"size": len(rows), "nan": float("nan"), "places": [os.getcwd(), IMPORTED_IN], "pid": os.getpid()}

def hang():
    Endless()

def wait(begun, end):
    pathlib.Path(begun).touch()
    while not os.path.exists(end):
        time.sleep(0.01)
    return "done"

def leave():
    os._exit(7)

def kill():
    os.kill(os.getpid(), 9)

def shout():
    for _ in range(200):
        print("x" * 10_000)
        print("x" * 10_000, file=sys.stderr)
    return "done"

def fail():
    raise ValueError("a bad\\n\\x1b[31mvalue")

def quit():
    sys.exit(0)

def interrupt():
    raise KeyboardInterrupt

def no_data():
    return Endless
"""


HANGS = """
import os, time
open({begun!r}, "w")
while not os.path.exists({end!r}):
    time.sleep(0.01)
os._exit(3)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "src").mkdir()
    (folder / "src" / "__init__.py").touch()
    (folder / "src" / "experiment.py").write_text("import src.work\n")
    (folder / "src" / "work.py").write_text(CODE)
    return folder


def test_a_call_runs_in_the_project_and_in_no_other_process(project: Path) -> None:
    path, before = [*sys.path], {name: sys.modules.get(name) for name in ("src", "src.work")}
    first, second = (call(project, "src.work:size", ["a", {"b": 1}]) for _ in range(2))
    assert first["size"] == 2
    assert first["nan"] != first["nan"]
    assert first["places"] == [str(project), str(project)]
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert sys.path == path
    assert {name: sys.modules.get(name) for name in before} == before
    assert call(project, "src.work:shout") == "done"
    assert call(project, "src.work:size", ["x" * 100] * 100_000)["size"] == 100_000
    with pytest.raises(MlxError, match="has no attribute 'missing'"):  # it fails before it needs its arguments
        call(project, "src.work:missing", "x" * 1_000_000)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("src.work:leave", "src.work:leave returned nothing: its process ended"),
        ("src.work:kill", "src.work:kill returned nothing: its process ended"),
        ("src.work:fail", "ValueError: a bad (work.py:35)"),
        ("src.work:quit", "SystemExit: 0 (work.py:38)"),
        ("src.work:interrupt", "KeyboardInterrupt: KeyboardInterrupt (work.py:41)"),
        ("src.work:no_data", "TypeError: Object of type type is not JSON serializable"),
        ("src.work:missing", "AttributeError: module 'src.work' has no attribute 'missing'"),
        ("src.missing:f", "AttributeError: module 'src' has no attribute 'missing'"),
    ],
)
def test_a_call_that_fails_is_one_line(project: Path, function: str, line: str) -> None:
    with pytest.raises(MlxError) as raised:
        call(project, function)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_calls_in_progress_hold_nobody_else_and_outlive_a_change_of_the_code(project: Path, tmp_path: Path) -> None:
    begun, end, file = tmp_path / "begun", tmp_path / "end", project / "src" / "work.py"
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(call, project, "src.work:wait", str(begun), str(end))
        wait_for(begun.exists)
        with pytest.raises(NoAnswerError, match=r"src\.work:hang did not return within 1 s, and was stopped"):
            call(project, "src.work:hang", timeout_s=1)
        file.write_text(CODE + "def added(): return 1")
        assert call(project, "src.work:added") == 1
        assert not waiting.done()
        end.touch()
        assert waiting.result() == "done"


def test_an_import_that_hangs_is_stopped_and_holds_no_other_project(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "src" / "experiment.py"
    hangs.parent.mkdir()
    begun, end = tmp_path / "begun", tmp_path / "end"
    hangs.write_text(HANGS.format(begun=str(begun), end=str(end)))
    with ThreadPoolExecutor() as threads:
        call(project, "src.work:size", [])
        large = ["x" * 1000] * 1000
        stuck = [threads.submit(call, tmp_path, "src.experiment:f", large) for _ in range(3)]
        wait_for(begun.exists)
        assert call(project, "src.work:size", [])["size"] == 0
        assert not any(item.done() for item in stuck)
        end.touch()
        for item in stuck:
            with pytest.raises(MlxError, match="importing src took more than 120 s, or ended its process"):
                item.result()
    end.unlink()
    monkeypatch.setattr(workbench, "START_S", 0.5)
    with pytest.raises(MlxError, match=r"importing src took more than 0\.5 s, or ended its process"):
        call(tmp_path, "src.experiment:f")
    monkeypatch.undo()
    hangs.write_text("def f(): return 1")
    assert call(tmp_path, "src.experiment:f") == 1
