"""Finished items of data jobs: which are kept, and what is left of the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_runtime.companions.jobs.filling import Output
from mlx_runtime.companions.jobs.items import FinishedItems
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.pure


class Job:
    """A job with the part that identifies its items."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def write(self, item: int) -> int:
        return item

    def check(self, item: int) -> int:
        return item


def items(folder: Path, *, resumed: bool) -> FinishedItems:
    output = folder / "output"
    output.mkdir(exist_ok=True)
    return FinishedItems(RunFolder(folder / "run_001"), Output(str(output)), ["cfg"], resumed=resumed)


def finish(folder: Path, results: list[Any]) -> None:
    """Finish one item per result, each with a file of its number."""
    done, job = items(folder, resumed=False), Job()
    keys, _ = done.begin_call(job, job.write, range(len(results)))
    for number, (key, result) in enumerate(zip(keys, results, strict=True)):
        (folder / "output" / f"{number}.txt").touch()
        done.add(key, result, [f"{number}.txt"])
    done.close()


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "output").iterdir())


def test_results_are_kept_that_json_does_not_change(tmp_path: Path) -> None:
    kept = [1, None, "é", 0.1, {"a": [1, {}]}]
    finish(tmp_path, [*kept, (1, 2), {1: 2}, np.float64(0.5), object()])
    job = Job()
    _, known = items(tmp_path, resumed=True).begin_call(job, job.write, range(9))
    assert {number: item.result for number, item in known.items()} == dict(enumerate(kept))
    assert left(tmp_path) == [f"{number}.txt" for number in range(len(kept))]


@pytest.mark.parametrize(
    ("job", "method", "wanted", "same"),
    [
        (Job(), "write", [0, 1, 2], [0, 1, 2]),
        (Job(cfg=2, output=3), "write", [0, 1, 2], [0, 1, 2]),  # of the config, and of the runtime
        (Job(), "write", [0, 5, 2], [0, 2]),
        (Job(), "write", [0], [0]),
        (Job(), "check", [0, 1, 2], []),
        (Job(mean=1.5), "write", [0, 1, 2], []),  # an attribute that `run` has set
        (Job(mean=lambda: 0), "write", [0, 1, 2], []),  # cannot be compared
    ],
)
def test_only_equal_calls_are_kept(job: Job, method: str, wanted: list[int], same: list[int], tmp_path: Path) -> None:
    finish(tmp_path, [0, 1, 2])
    _, known = items(tmp_path, resumed=True).begin_call(job, getattr(job, method), wanted)
    assert list(known) == same
    assert left(tmp_path) == [f"{number}.txt" for number in same]


def test_calls_that_are_not_repeated_leave_nothing(tmp_path: Path) -> None:
    finish(tmp_path, [0])
    done = items(tmp_path, resumed=True)
    assert (done.count, left(tmp_path)) == (1, ["0.txt"])
    done.complete()
    assert left(tmp_path) == []


def test_a_function_or_an_item_with_unknown_files_is_repeated(tmp_path: Path) -> None:
    done, job = items(tmp_path, resumed=False), Job()
    (key,), _ = done.begin_call(job, abs, [1])
    done.add(key, 1, [])
    (key,), _ = done.begin_call(job, job.write, [1])
    done.add(key, 1, None)
    assert done.count == 0


def test_damaged_lines_and_lost_files_are_ignored(tmp_path: Path) -> None:
    finish(tmp_path, [0, 1, 2])
    file = tmp_path / "run_001" / "logs" / "items.jsonl"
    first, second, third = file.read_text().splitlines()
    file.write_text("\n".join([first, second.replace("1.txt", "../1.txt"), "[]", third[:-5]]))
    assert items(tmp_path, resumed=True).count == 1
    (tmp_path / "output" / "0.txt").unlink()
    assert items(tmp_path, resumed=True).count == 0


def test_a_file_that_is_written_again_stays(tmp_path: Path) -> None:
    """Even if an item that is not repeated had written it, too."""
    job, done = Job(), items(tmp_path, resumed=False)
    (tmp_path / "output" / "0.txt").touch()
    for method in (job.write, job.check):
        (key,), _ = done.begin_call(job, method, [0])
        done.add(key, 0, ["0.txt"])
    done.close()
    again = items(tmp_path, resumed=True)
    (key,), kept = again.begin_call(job, job.write, [1])
    again.add(key, 1, ["0.txt"])
    again.complete()
    assert (kept, left(tmp_path)) == ({}, ["0.txt"])
