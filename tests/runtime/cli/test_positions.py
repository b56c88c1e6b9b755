"""`mlx xp ps`, without a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.cli.verbs import xp
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import WorkerPosition
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage import documents, leases
from mlx_runtime.workers.deadlocks import POSITIONS, answer_request, read_answer

pytestmark = pytest.mark.pure


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose driver is this process, which never looks for requests."""
    monkeypatch.setattr(xp, "ANSWERS_S", 0.5)
    folder = RunFolder(tmp_path / "digits" / "run_001")
    folder.path.mkdir(parents=True)
    write(folder)
    return folder


def write(run: RunFolder, **fields: Any) -> None:
    record = leases.lease() | {"experiment": "digits", "run": "run_001", "start": documents.now(), **fields}
    run.record.write_text(json.dumps(record))


def ask(run: RunFolder) -> list[str]:
    found = xp.locate(str(run.path), None)
    return [xp.positions_title(found), *("  ".join(row.values()) for row in xp.positions_table(found))]


def test_a_driver_that_does_not_answer_is_reported(run: RunFolder) -> None:
    with pytest.raises(MlxError, match=r"digits/run_001 has not answered for 0 s: process \d+ on \S+, last heard from"):
        ask(run)
    assert run.LOCATE not in run.names()


def test_a_run_whose_driver_died_is_not_asked(run: RunFolder) -> None:
    write(run, pid=1, pid_started="0")
    with pytest.raises(UsageError, match="Resume: mlx train run --resume=digits/run_001"):
        ask(run)


def test_ranks_without_an_answer_are_listed(run: RunFolder) -> None:
    run.ask(run.LOCATE)
    answer_request(run, [WorkerPosition(0, 0, "train", 5, "src/a.py:3 in f", None, 70.0, host="a", pid=1)], 2)
    rows = xp.positions_table(read_answer(run))
    assert list(rows[0].values()) == ["0", "a", "1: train 5", "1 min 10 s", "src/a.py:3 in f"]
    assert [rows[1]["rank"], rows[1]["line"].partition(":")[0]] == ["1", "no answer within 5 s"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"time": 1}', b'{"time": "2026-01-01T00:00:00Z", "workers": [{}]}'])
def test_an_answer_of_another_shape_is_refused(run: RunFolder, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "ask", lambda folder, request: (folder.path / POSITIONS).write_bytes(content))
    with pytest.raises(MlxError, match="the answer of the driver of digits/run_001 cannot be read: "):
        ask(run)
