"""Finished items of data jobs: which are kept, and what is left of the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_runtime.companions.jobs.datajob import DataJob
from mlx_runtime.companions.jobs.filling import Output
from mlx_runtime.companions.jobs.items import FinishedItems
from mlx_runtime.errors import DataJobError
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.pure


def items(folder: Path, *, resumed: bool) -> FinishedItems:
    output = folder / "output"
    output.mkdir(exist_ok=True)
    return FinishedItems(RunFolder(folder / "run_001"), Output(str(output)), resumed=resumed)


def finish(folder: Path, results: list[Any]) -> None:
    """Finish one item per result, each with a file of its number, which is its key, too."""
    done = items(folder, resumed=False)
    for number, result in enumerate(results):
        (folder / "output" / f"{number}.txt").touch()
        done.add(str(number), result, [f"{number}.txt"])
    done.close()


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "output").iterdir())


def test_results_are_kept_that_json_does_not_change(tmp_path: Path) -> None:
    kept = [1, None, "é", 0.1, {"a": [1, {}]}]
    finish(tmp_path, [*kept, (1, 2), {1: 2}, np.float64(0.5), object()])
    known = items(tmp_path, resumed=True).results([str(number) for number in range(9)])
    assert known == dict(enumerate(kept))
    assert left(tmp_path) == [f"{number}.txt" for number in range(len(kept))]


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    done = items(tmp_path, resumed=False)
    done.results(["a"])
    with pytest.raises(DataJobError, match="two items have the key 'a'; make the keys of all calls of self.map unique"):
        done.results(["b", "a"])


def test_a_key_needs_a_function_whose_files_are_known() -> None:
    for function in (abs, DataJob().map):
        with pytest.raises(DataJobError, match=r"^self\.map\(.*, key=\.\.\.\) needs a method of the job"):
            DataJob().map(function, [1], key=str)


def test_damaged_lines_and_lost_files_are_ignored(tmp_path: Path) -> None:
    finish(tmp_path, [0, 1, 2])
    file = tmp_path / "run_001" / "logs" / "items.jsonl"
    first, second, third = file.read_text().splitlines()
    file.write_text("\n".join([first, second.replace("1.txt", "../1.txt"), "[]", third[:-5]]))
    assert items(tmp_path, resumed=True).count == 1
    (tmp_path / "output" / "0.txt").unlink()
    assert items(tmp_path, resumed=True).count == 0
