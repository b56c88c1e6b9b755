"""The record of a run."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from mlx_runtime import registry
from mlx_runtime.layout import RunFolder


def fields(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_living_run_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.05)
    beats = iter(f"2026-01-01T00:00:{second:02}" for second in range(60))
    monkeypatch.setattr(registry, "now", lambda: next(beats))
    record = registry.Record(RunFolder(tmp_path))
    first = fields(tmp_path)["heartbeat"]
    with record.alive():
        time.sleep(0.3)
    later = fields(tmp_path)["heartbeat"]
    assert later > first
    time.sleep(0.2)
    assert fields(tmp_path)["heartbeat"] == later


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    registry.Record(RunFolder(tmp_path)).update(metrics={"a": float("nan"), "b": [float("inf"), 1.0]})
    assert fields(tmp_path)["metrics"] == {"a": None, "b": [None, 1.0]}


def test_the_end_is_written_on_a_full_disk_from_the_reserve(tmp_path: Path) -> None:
    record = registry.Record(RunFolder(tmp_path))
    (tmp_path / ".reserve").write_bytes(b"0" * 100)
    record.finish("FAILED", error="x")
    assert not (tmp_path / ".reserve").exists()
    assert (fields(tmp_path)["status"], fields(tmp_path)["error"]) == ("FAILED", "x")


def test_commit_and_uncommitted_changes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert registry.provenance([])["git"] is None
    (tmp_path / "a.py").write_text("old\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "a.py").write_text("new\n")
    found = registry.provenance(["a=1"])
    assert len(found["git"]["commit"]) == 40
    assert "-old\n+new\n" in found["git"]["diff"]
    assert found["overrides"] == ["a=1"]
    assert "pytest" in found["command"]
