"""What a command on a cluster sends back, and what a hostile job may not do."""

import base64
import json
import os
from pathlib import Path

import pytest

from mlx_runtime.companions.ray import frames, remote, remote_job
from mlx_runtime.errors import ClusterError, UsageError

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
        {"kind": "out"},
        {"kind": "out", "data": "?"},
        {"kind": "file", "path": "../.bashrc", "data": ""},
        {"kind": "file", "path": "/etc/passwd", "data": ""},
        {"kind": "exit", "code": 256},
        {"kind": "eval", "text": "1"},
    ],
)
def test_damaged_frames_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ClusterError, match="sent an invalid frame"):
        [*frames.Reader(KEY).feed(frame(**fields))]


def test_other_damage_is_refused() -> None:
    for text in (f"{KEY} [1\n", f"{KEY} {'[' * 100_000}\n"):
        with pytest.raises(ClusterError, match="sent an invalid frame"):
            [*frames.Reader(KEY).feed(text)]


def test_a_job_writes_only_the_files_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("page.html", "src"):
        Path(name).mkdir() if name == "src" else Path(name).write_text("old")
    Path("link").symlink_to(outside := tmp_path.parent / "outside")
    for words in (["-o", "./page.html"], ["-opage.html"], ["--output=page.html"]):
        named = remote.Files(["xp", "report", "src", *words])
        named.write("page.html", b"a")
        named.write("page.html", b"b")
        assert Path("page.html").read_text() == "ab"
    below = remote.Files(["xp", "export", "src", "-o", "export"])
    below.write("export/weights", b"c")
    below.write("export/program", b"d")
    assert sorted(os.listdir("export")) == ["program", "weights"]
    Path("export/l").symlink_to(tmp_path.parent)
    nothing = remote.Files(["xp", "ls"])
    for files in (named, below, nothing):
        for path in ("src/experiment.py", ".bashrc", "link", "torch.py", "export/l/outside"):
            with pytest.raises(ClusterError, match="sent a file that the command does not write"):
                files.write(path, b"hostile")
    with pytest.raises(UsageError, match="with --on, mlx xp export needs -o PATH"):
        remote.Files(["xp", "export", "src"])
    remote.Files(["xp", "export", "--help"])
    remote.Files(["xp", "export", "src", "-o", "/ceph/runs/out"], "/ceph/runs")
    for path in (".", "/home/me/out", "../out", "/ceph/out"):
        with pytest.raises(UsageError, match=f"with --on, -o {path} must be a path below this folder, like -o out"):
            remote.Files(["xp", "report", "src", "-o", path], "/ceph/runs")
    assert not outside.exists()
    Path("src/conf.yaml").touch()
    with pytest.raises(UsageError, match="cannot write src/page.html into src"):
        remote.Files(["xp", "report", "src", "-o", "src/page.html"])


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError, match="a line of more than"):
        [*frames.Reader(KEY).feed(frame(kind="out", data="a" * (2 << 20)))]
    reader = frames.Reader(KEY)
    assert [*reader.feed("x" * 100_000 + "\n")] == []
    assert len(reader.other) == 300
    monkeypatch.setattr(remote_job, "FILES_BYTES", 10)
    files = remote.Files(["xp", "report", "a", "-o", "a"])
    files.write("a", b"x" * 10)
    with pytest.raises(ClusterError, match="sent more than 0 MB of files"):
        files.write("a", b"x")
