"""Quick looks with the real command: `--fast-dev-run`, `--overfit` and `-q`."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx

pytestmark = pytest.mark.process

Make = Callable[[str], Path]

HERE = ("cfg.start_workers=0",)

METRICS = ("accuracy", "confidence", "cross_entropy", "f1")


def seen(folder: Path, workers: int) -> list[dict]:
    """Return the rows that each rank read, by dataset, epoch and batch."""
    return [json.loads((folder / "seen" / f"rank_{rank}.json").read_text()) for rank in range(workers)]


class TestFastDevRun:
    @pytest.mark.local
    def test_all_code_runs_on_two_workers_and_nothing_is_kept(self, digits: Path, mlx: Mlx) -> None:
        before = sorted(digits.rglob("*"))
        scratch, ray = (
            Path(tempfile.mkdtemp(prefix="r", dir="/tmp")) for _ in range(2)
        )  # short, because socket paths are limited
        done = mlx(digits, "train", "run", "--fast-dev-run", TMPDIR=str(scratch), RAY_TMPDIR=str(ray))
        shutil.rmtree(ray)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert "train     128 rows in 2 steps, global batch 64\n" in done.stdout
        assert "run       digits, fast dev run: 2 batches per pass, nothing is kept\n" in done.stdout
        assert len(re.findall(r"^ +train +val$", done.stdout, re.MULTILINE)) == 1
        assert len(re.findall(r"^  1/1 ", done.stdout, re.MULTILINE)) == 2  # the second time with the test set
        assert "test/accuracy" in done.stdout
        assert done.stdout.endswith("without an error; nothing of this run is kept\n")
        assert "mlx-fast-" not in done.stdout  # no path of deleted files
        assert sorted(digits.rglob("*")) == before
        assert list(scratch.glob("mlx-fast-*")) == []
        shutil.rmtree(scratch)

    def test_what_is_typed_wins(self, digits: Path, mlx: Mlx) -> None:
        typed = ("cfg.debug.limit_batches=3", "cfg.num_epochs=2")
        done = mlx(digits, "train", "run", "--fast-dev-run", *typed, *HERE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "train     96 rows in 3 steps, global batch 32\n" in done.stdout
        assert re.search(r"^  2/2 ", done.stdout, re.MULTILINE)

    def test_what_contradicts_it_is_refused(self, digits: Path, mlx: Mlx) -> None:
        shutil.copytree(digits / "src", digits / "runs" / "digits" / "run_001")
        done = mlx(digits, "train", "run", "--fast-dev-run", "--resume", "run_001", *HERE)
        assert done.returncode == 2
        assert "--fast-dev-run keeps nothing, so it cannot resume a run" in done.stderr


class TestOverfit:
    @pytest.mark.cluster
    def test_every_kind_reads_the_same_rows_in_each_epoch(self, experiment: Make, mlx: Mlx) -> None:
        folder = experiment("kinds")
        done = mlx(folder, "train", "run", "--verbose", "--overfit", "3", "cfg.num_epochs=2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Started a local Ray instance" in done.stdout + done.stderr  # with --verbose
        self.check(folder, table=64, val=16)
        assert "train     24 rows in 3 steps, global batch 8\n" in done.stdout
        for line in (folder / "runs" / "kinds" / "run_001" / "conf.yaml").read_text().splitlines():
            assert "overfit_batches" not in line or line == "    overfit_batches: 3"

    @staticmethod
    def check(folder: Path, table: int = 4, val: int = 4) -> None:
        """Assert that each epoch has the first rows of each dataset; of these two, the sizes of batches are given."""
        first, second = seen(folder, 2)
        for name, size in (("train", 4), ("numbers", 4), ("table", table), ("val", val), ("test", 4)):
            for rank in (first, second):
                assert rank[name][0] == rank[name][1], name
                assert [len(batch) for batch in rank[name][0]] == [size] * 3, name
            rows = {row for rank in (first, second) for batch in rank[name][0] for row in batch}
            assert len(rows) == 6 * size
            if name != "numbers":  # whose order is arbitrary
                assert rows == set(range(6 * size)), name


class TestQuiet:
    @pytest.mark.local
    def test_only_the_folder_and_the_end_are_printed_and_all_is_logged(self, digits: Path, mlx: Mlx) -> None:
        done = mlx(digits, "train", "run", "-q", "cfg.num_epochs=2", "cfg.start_workers=1")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        run = digits / "runs" / "digits" / "run_001"
        lines = done.stdout.splitlines()
        assert lines[:2] == [f"folder    {run}", ""]
        assert [line.split()[0] for line in lines[2:]] == [
            *(f"{name}/{metric}" for name in ("test", "train", "val") for metric in METRICS),
            *("best", "took", "run", "TensorBoard"),
        ]
        log = (run / "logs" / "driver.log").read_text()
        for text in ("run       digits run_001\n", f"folder    {run}\n", "device    ", "\n  1/2 ", "\n  2/2 "):
            assert log.count(text) >= 1, text
        assert log.endswith(done.stdout.partition("\n")[2])
