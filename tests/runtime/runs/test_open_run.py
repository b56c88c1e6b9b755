"""Reading a run as in a notebook."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Mlx

from mlx_runtime import MlxError, open_run

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def run(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the template's experiment with two epochs; the first one is the best, by the minimum of `val/f1`."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("run") / "digits"))
    done = mlx(
        folder,
        "train",
        "run",
        "cfg.start_workers=0",
        "cfg.num_epochs=2",
        "cfg.monitor=val/cross_entropy",
        "cfg.mode=max",
    )
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "digits" / "run_001"


def test_its_record_config_and_numbers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[2])
    found = open_run("digits/run_001")
    assert repr(found) == "<Run digits/run_001, SUCCEEDED>"
    assert found.record["seed"] == 0
    assert found.config["cfg"]["num_epochs"] == 2
    frame = found.metrics()
    assert {"step", "epoch", "timestamp", "train/cross_entropy", "val/accuracy", "lr/adam"} <= set(frame.columns)
    assert frame["val/accuracy"].dropna().between(0, 1).all()
    assert math.isclose(frame["test/accuracy"].dropna().iloc[-1], found.record["metrics"]["test/accuracy"])


def test_its_states_and_models(run: Path) -> None:
    found = open_run(run)
    assert (found.state()["epoch"], found.state("best")["epoch"]) == (1, 0)
    state = found.state("best")
    assert set(state["models"]) == {"net"}
    assert all(isinstance(item, torch.Tensor) and "module" not in name for name, item in state["models"]["net"].items())


def test_its_state_is_read_without_ray(run: Path) -> None:
    script = f"import sys, mlx_runtime; mlx_runtime.open_run({str(run)!r}).state(); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_its_models_give_numbers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[2])
    models = open_run("digits/run_001").load_models()
    assert models.net.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    weights = open_run("digits/run_001").state()["models"]["net"]
    assert all(torch.equal(item, weights[name]) for name, item in models.net.state_dict().items())


def test_its_stored_code_runs_anywhere_but_only_for_those_who_trust_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MlxError, match=r"use the stored code: load_models\(trust=True\)"):
        open_run(run).load_models()
    models = open_run(run).load_models("best", trust=True)
    assert models.net.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert type(models.net).__module__ != "src.models"


def test_what_is_not_there_is_told(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(run.parents[2])
    for text, message in [
        ("digits", "'digits' does not name a run; write name/run_003, or the path of its folder"),
        ("digit/run_001", "no runs of 'digit' in .* Did you mean 'digits'?"),
        ("digits/run_009", "digits has no run 'run_009'"),
    ]:
        with pytest.raises(MlxError, match=message):
            open_run(text)
