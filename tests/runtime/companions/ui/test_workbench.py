"""Code of a project runs in processes of its own, which can neither stop nor change the one that calls it."""

import os
import sys
from pathlib import Path

import pytest

from mlx_runtime.companions.ui.workbench import Workbench
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.process

CODE = """
import os, sys, time

class Endless:
    def __init__(self):
        time.sleep(1000)

def size(rows):
    return {"size": len(rows), "nan": float("nan"), "cwd": os.getcwd(), "pid": os.getpid()}

def hang():
    Endless()

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

def no_data():
    return Endless
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
    bench, path = Workbench(project), [*sys.path]
    first, second = (bench.call("src.work:size", ["a", {"b": 1}]) for _ in range(2))
    assert first["size"] == 2
    assert first["nan"] != first["nan"]
    assert first["cwd"] == str(project)
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert sys.path == path
    assert not {"src", "src.work"} & set(sys.modules)
    assert bench.call("src.work:shout") == "done"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("src.work:leave", "src.work:leave returned nothing: its process exited with code 7"),
        ("src.work:kill", "src.work:kill returned nothing: its process was killed by SIGKILL (out of memory?)"),
        ("src.work:fail", "ValueError: a bad value (src/work.py:27)"),
        ("src.work:quit", "SystemExit: 0 (src/work.py:30)"),
        ("src.work:no_data", "TypeError: Object of type type is not JSON serializable"),
        ("src.work:missing", "AttributeError: module 'src.work' has no attribute 'missing'"),
        ("src.missing:f", "AttributeError: module 'src' has no attribute 'missing'"),
    ],
)
def test_a_call_that_fails_is_one_line(project: Path, function: str, line: str) -> None:
    with pytest.raises(MlxError) as raised:
        Workbench(project).call(function)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_a_constructor_that_hangs_is_stopped_and_holds_nobody_else(project: Path) -> None:
    bench = Workbench(project)
    bench.call("src.work:size", [])
    with pytest.raises(MlxError, match=r"src\.work:hang did not return within 1 s, and was stopped"):
        bench.call("src.work:hang", timeout_s=1)
    assert bench.call("src.work:size", [])["size"] == 0


def test_changed_code_is_imported_anew_and_an_import_that_hangs_is_stopped(project: Path) -> None:
    bench, file = Workbench(project), project / "src" / "work.py"
    assert bench.call("src.work:size", [])["size"] == 0
    file.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(MlxError, match="did not return within 1 s"):
        bench.call("src.work:size", [], timeout_s=1)
    file.write_text(CODE.replace("len(rows)", "10"))
    assert bench.call("src.work:size", [])["size"] == 10
