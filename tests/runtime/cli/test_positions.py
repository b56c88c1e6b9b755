"""`mlx xp ps`, without a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.cli.verbs import positions
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.events import WorkerPosition
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage import documents, leases
from mlx_runtime.workers.deadlocks import POSITIONS, answer_request

pytestmark = pytest.mark.pure


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose driver is this process, which never looks for requests."""
    monkeypatch.setattr(positions, "LIMIT_S", 0.5)
    folder = RunFolder(tmp_path / "digits" / "run_001")
    folder.path.mkdir(parents=True)
    write(folder)
    return folder


def write(run: RunFolder, **fields: Any) -> None:
    record = leases.lease(experiment="digits", run="run_001", start=documents.now(), **fields)
    run.record.write_text(json.dumps(record))


def ask(run: RunFolder) -> list[str]:
    found = positions.locate(str(run.path), None, lambda text: None)
    return [*positions.lines(found), *("  ".join(row.values()) for row in positions.table(found))]


def test_a_driver_that_does_not_answer_is_reported(run: RunFolder) -> None:
    with pytest.raises(MlxError, match=r"digits/run_001 has not answered for 0 s: process \d+ on \S+, last heard from"):
        ask(run)
    assert run.LOCATE not in run.names()


def test_a_run_whose_driver_died_is_not_asked(run: RunFolder) -> None:
    write(run, pid=1, pid_started="0")
    with pytest.raises(UsageError, match="Resume: mlx train run --resume=digits/run_001"):
        ask(run)


@pytest.mark.parametrize(
    ("others", "summary"),
    [
        ({1: None}, "rank 0 waits for rank 1, in src/a.py:3 in f"),
        ({1: None, 2: "all_reduce"}, "ranks 0 and 2 wait for rank 1, in src/a.py:3 in f"),
        ({1: None, 2: None}, "rank 0 waits for ranks 1 and 2"),
        ({2: "all_reduce"}, "rank 1 did not answer within 5 s: stopped processes, or unreachable nodes"),
        ({1: "all_reduce"}, None),
    ],
)
def test_it_says_who_waits_for_whom(run: RunFolder, others: dict[int, str | None], summary: str | None) -> None:
    found = [
        WorkerPosition(rank, 0, "train", 5, "src/a.py:3 in f", waits, 70.0, host="a", pid=rank)
        for rank, waits in {0: "all_reduce", **others}.items()
    ]
    run.ask(run.LOCATE)
    answer_request(run, found, max(others) + 1)
    run_lines = [
        *positions.lines(
            {**positions.read_answer(run), "run": "a", "status": "RUNNING", "duration_s": 1.0, "record": {}}
        )
    ]
    assert run_lines[1:] == ([] if summary is None else [summary])


@pytest.mark.parametrize("content", [b"", b"[]", b'{"time": 1}', b'{"time": "2026-01-01T00:00:00Z", "workers": [{}]}'])
def test_an_answer_of_another_shape_is_refused(run: RunFolder, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "ask", lambda folder, request: (folder.path / POSITIONS).write_bytes(content))
    with pytest.raises(MlxError, match="the answer of the driver of digits/run_001 cannot be read: "):
        ask(run)
