"""What a command on a cluster sends back, and what a hostile job may not do."""

import base64
import json
import os
from pathlib import Path

import pytest

from mlx_runtime.companions.ray import frames, remote
from mlx_runtime.errors import ClusterError

pytestmark = pytest.mark.pure

KEY = "mlx-0123"


def frame(**fields: object) -> str:
    return f"{KEY} {json.dumps(fields)}\n"


def test_frames_arrive_in_parts_among_other_lines() -> None:
    data = base64.b64encode(b"ab").decode()
    text = frame(kind="out", data=data) + "a warning of Ray\n" + frame(kind="exit", code=3)
    reader, found = frames.Reader(KEY), list[frames.Frame]()
    for letter in text:
        found += reader.feed(letter)
    assert found == [frames.Frame("out", data=b"ab"), frames.Frame("exit", code=3)]
    assert reader.other == "a warning of Ray"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "out"},
        {"kind": "out", "data": "?"},
        {"kind": "out", "data": 1},
        {"kind": "file", "path": "../.bashrc", "data": ""},
        {"kind": "file", "path": "/etc/passwd", "data": ""},
        {"kind": "exit", "code": 256},
        {"kind": "exit", "code": "0"},
        {"kind": "ask", "text": None},
        {"kind": "eval", "text": "1"},
    ],
)
def test_damaged_frames_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ClusterError, match="has sent a damaged frame"):
        [*frames.Reader(KEY).feed(frame(**fields))]


def test_other_damage_is_refused() -> None:
    for text in (f"{KEY} [1\n", f"{KEY} {'[' * 100_000}\n"):
        with pytest.raises(ClusterError, match="has sent a damaged frame"):
            [*frames.Reader(KEY).feed(text)]
    with pytest.raises(ClusterError, match="a line of more than"):
        [*frames.Reader(KEY).feed("x" * (frames.LINE_BYTES + 1))]


def test_a_job_writes_only_the_files_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("page.html", "src"):
        Path(name).mkdir() if name == "src" else Path(name).write_text("old")
    files = remote.Files(["xp", "ls", "src", "--html", "./page.html"])
    files.write("page.html", b"a")
    files.write("page.html", b"b")
    files.write("export/weights", b"c")  # a new folder
    files.write("export/program", b"d")
    assert (Path("page.html").read_text(), sorted(os.listdir("export"))) == ("ab", ["program", "weights"])
    for path in ("src/experiment.py", ".bashrc"):
        with pytest.raises(ClusterError, match="which the command does not write"):
            files.write(path, b"hostile")
