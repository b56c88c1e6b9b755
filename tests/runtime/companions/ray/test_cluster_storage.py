"""URIs of folders on a cluster, and what its agent answers; `test_cluster.py` has both on a real cluster."""

from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.companions.ray.cluster_storage import path_there, reached, split, uri_of
from mlx_runtime.companions.ray.storage_agent import INLINE_BYTES, PROTOCOL, pack, reply_to, unpack
from mlx_runtime.errors import ElsewhereError, StorageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.storage.files import join_path

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("url", ["http://head:8265", "https://[::1]:8265", "https://proxy/team/ray"])
def test_a_uri_names_the_dashboard_and_the_folder(url: str) -> None:
    uri = join_path(uri_of(url, "/ceph/runs"), "digits", "run_001")
    assert split(uri) == (url, "/ceph/runs/digits/run_001")
    assert path_there(uri) == "/ceph/runs/digits/run_001"
    assert path_there("/ceph/runs") == "/ceph/runs"


@pytest.mark.parametrize("uri", ["ray+http://head:8265", "ray+ftp://head/runs", "ray+http:///runs"])
def test_an_incomplete_uri_is_refused(uri: str) -> None:
    with pytest.raises(StorageError, match=r"write ray\+http://HEAD:8265/FOLDER"):
        split(uri)


def test_only_folders_that_this_machine_lacks_are_those_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = str(tmp_path / "there")
    assert reached(str(tmp_path), "head") == str(tmp_path)
    assert reached("runs", "head") == "runs"
    assert reached(there, "head:6379") == f"ray+http://head:8265{there}"
    assert capsys.readouterr().err == f"storage   {there} on http://head:8265, as this machine lacks it\n"
    monkeypatch.setenv("MLX_JOB", "digits-run_001")
    assert reached(there, "head") == there


def test_commands_run_on_the_cluster_for_a_folder_that_this_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    lookup.refuse_elsewhere(str(tmp_path))
    lookup.refuse_elsewhere("runs")
    with pytest.raises(ElsewhereError, match=f"lacks {there}; if the cluster has it, look there: mlx --on http://head"):
        lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("MLX_JOB", "digits-run_001")
    lookup.refuse_elsewhere(there)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A storage with a run, and a link that leads out of it."""
    run = tmp_path / "runs" / "digits" / "run_001"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    return tmp_path / "runs"


def ask(root: Path, call: str, *arguments: Any, data: bytes = b"", protocol: int = PROTOCOL) -> tuple[Any, Any]:
    message = {"protocol": protocol, "root": str(root), "call": call, "arguments": arguments}
    head, content = reply_to(pack(message, data))
    return head.get("done", (head.get("error"), head.get("text"))), content


def test_entries_are_listed(root: Path) -> None:
    assert sorted(path for path, *_ in ask(root, "entries", "", False)[0]) == ["digits", "out"]
    assert [path for path, *_, is_file in ask(root, "entries", "", True)[0] if is_file] == ["digits/run_001/run.json"]
    assert ask(root, "entries", "none", False)[0] == []


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("content", ["out/secret"]),
        ("entries", ["out", False]),
        ("put", ["out/new"]),
        ("discard", ["out/secret"]),
        ("discard_folder", ["out/runs"]),
        ("rename", ["digits", "out/digits"]),
        ("rename", ["out/secret", "mine"]),
        ("content", ["../secret"]),
        ("put", ["../new"]),
        ("put", ["digits//new"]),
        ("claim", ["digits/../../new"]),
    ],
)
def test_nothing_leads_out_of_the_storage(root: Path, call: str, arguments: list[Any]) -> None:
    before = sorted(root.parent.rglob("*"))
    assert ask(root, call, *arguments)[0][0] in ("os", "irregular")
    assert sorted(root.parent.rglob("*")) == before


def test_no_link_is_written_through(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("theirs")
    (root / "leads").symlink_to(outside)
    (root / "mine").write_text("mine")
    assert ask(root, "extend", "leads")[0][0] == "os"
    assert outside.read_text() == "theirs"


def test_a_link_itself_is_removed(root: Path) -> None:
    assert ask(root, "discard", "out")[0] is None
    assert (root.parent / "secret").exists()
    assert not (root / "out").is_symlink()
    assert ask(root, "discard_folder", "")[0] is None  # the storage itself
    assert not root.exists()


def test_what_it_does_not_know_is_an_error_of_one_request(root: Path) -> None:
    assert ask(root, "system", "")[0] == ("storage", "there is no call 'system'")
    assert ask(root, "entries", "", protocol=7)[0] == ("storage", "the agent answers requests of version 2, not 7")
    assert ask(root / "a" / "b", "put", "c")[0][0] == "os"  # the folder above is missing: a mount, or a typing error
    assert reply_to(b"nonsense")[0]["error"] == "storage"


def test_large_files_are_not_copied(root: Path) -> None:
    (root / "large").write_bytes(b"x" * (INLINE_BYTES + 1))
    assert ask(root, "content", "large") == (INLINE_BYTES + 1, root / "large")


@pytest.mark.parametrize("data", [b"", b"text " * 1000, bytes(range(256))])
def test_messages_are_packed_and_unpacked(data: bytes) -> None:
    message = pack({"root": "/ceph"}, data)
    head, found = unpack(message)
    assert (head["root"], found) == ("/ceph", data)
    assert len(message) < len(data) / 10 or not head["packed"]
