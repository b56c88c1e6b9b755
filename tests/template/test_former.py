"""An experiment that was generated, bound, prepared and trained by an earlier version still works.

When one of its runs is resumed, renamed settings are reported with their new keys.

`tests/former/0.1.0.zip` is such a folder: `mlx train new former`, a smaller net in conf.yaml, `mlx train prepare`, then
`mlx train run` for two epochs (run_001) and `mlx train run cfg.num_epochs=1` (run_002).
"""

import functools
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Mlx

from mlx_runtime import open_run

pytestmark = pytest.mark.examples


@pytest.fixture
def former(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ROOT / "tests" / "former" / "0.1.0.zip") as archive:
        archive.extractall(tmp_path / "former")
    return tmp_path / "former"


def numbers(folder: Path, run: str, epoch: int) -> dict[str, float]:
    """The metrics of an epoch, without times, speeds and those of intervals, which that version did not record."""
    values: dict[str, Any] = {}
    for line in (folder / "runs" / "former" / run / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report["epoch"] == epoch:
            recorded = {name: value for name, value in report.items() if name.startswith(("train/", "val/", "test/"))}
            values |= {name: value for name, value in recorded.items() if not name.endswith("_interval")}
    assert values
    return values


def test_it_binds_trains_and_resumes(former: Path, mlx: Mlx) -> None:
    conf = (former / "src" / "conf.yaml").read_text()
    refused = mlx(former, "train", "bind")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    cure = re.fullmatch(
        r"error: datasets\.train was loaded .* write at the top of src/__init__\.py: (.*)\n", refused.stderr
    )
    assert cure, refused.stderr
    (former / "src" / "__init__.py").write_text(cure[1])
    bound = mlx(former, "train", "bind")
    assert bound.returncode == 0, bound.stderr
    kept = (former / "src" / "conf.yaml").read_text()
    assert "prefetch_batches: null\n" in kept  # its default follows the code
    assert "num_epochs: 2 # enough to see it resume" in kept
    assert [line for line in conf.splitlines() if "_target_" in line] == [
        line for line in kept.splitlines() if "_target_" in line
    ]

    refused = mlx(former, "train", "run", "--resume", "run_002", "cfg.num_epochs=2")
    moved = re.findall(r"^  cfg\.(\w+) is cfg\.\w+\.\w+ now$", refused.stderr, re.MULTILINE)
    assert (refused.returncode, len(moved)) == (1, 14), refused.stderr
    stored = former / "runs" / "former" / "run_002" / "conf.yaml"  # which has their defaults
    lines = stored.read_text().splitlines(keepends=True)
    stored.write_text("".join(line for line in lines if line.partition(":")[0].strip() not in moved))
    resumed = mlx(former, "train", "run", "--resume", "run_002", "cfg.num_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    on_another_processor = functools.partial(pytest.approx, rel=1e-6)
    assert numbers(former, "run_002", 1) == on_another_processor(numbers(former, "run_001", 1))

    new = mlx(former, "train", "run")
    assert new.returncode == 0, new.stderr
    assert "prepared  train, val, test" in new.stdout
    for epoch in (0, 1):
        assert numbers(former, "run_003", epoch) == on_another_processor(numbers(former, "run_001", epoch))


def test_its_runs_are_listed_and_read(former: Path, mlx: Mlx, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(mlx(former, "xp", "ls", "--json").stdout)
    assert [(row["run"], row["status"], row["epoch"]) for row in listed] == [
        ("run_001", "SUCCEEDED", 2),
        ("run_002", "SUCCEEDED", 1),
    ]
    best = json.loads(mlx(former, "xp", "best", "former", "--json").stdout)
    assert best["checkpoint"] == str(former / "runs" / "former" / "run_001" / "checkpoints" / "epoch_0002")
    run = open_run(str(former / "runs" / "former" / "run_001"))
    assert run.record["status"] == "SUCCEEDED"
    assert run.metrics()["val/accuracy"].dropna().iloc[-1] == pytest.approx(best["value"])
    assert run.state("best")["epoch"] == 1
    [net] = vars(run.load_models(trust=True)).values()
    assert sum(item.numel() for item in net.parameters()) == 678
