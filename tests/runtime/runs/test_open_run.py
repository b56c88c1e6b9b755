"""Reading a run as in a notebook."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Mlx, edit

from mlx_runtime import MlxError, open_run
from mlx_runtime.companions.hub.contents import card
from mlx_runtime.companions.views import report
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.queries import listing
from mlx_runtime.runs.queries import ranking as ranking

pytestmark = pytest.mark.process


EVALUATED = """            if self.global_step == 8:
                self.evaluate(val, epoch)
                self.save_checkpoint(epoch=epoch)
                self.models.net.train()
"""


@pytest.fixture(scope="module")
def run(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the template's experiment with two epochs. A checkpoint in the middle of the first one is the best."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("run") / "digits"))
    code = folder / "src" / "experiment.py"
    edit(code, "\n    def evaluate", f"{EVALUATED}\n    def evaluate")
    done = mlx(
        folder,
        "train",
        "run",
        "cfg.start_workers=0",
        "cfg.num_epochs=2",
        "cfg.monitor=val/cross_entropy",
        "cfg.mode=max",
        "cfg.keep_checkpoints=1",
    )
    assert done.returncode == 0, done.stderr
    (folder / "printed").write_text(done.stdout)
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
    by_epoch = found.metrics(by="epoch")
    assert [*by_epoch["epoch"]] == [0, 1]
    assert [*by_epoch["step"]] == [*frame.groupby("epoch")["step"].max()]
    for name in ("train/cross_entropy", "val/accuracy"):  # of two evaluations in an epoch, the last one
        assert [*by_epoch[name]] == [*frame.groupby("epoch")[name].last()]
        assert len(frame[name].dropna()) > 2
    assert math.isclose(frame["test/accuracy"].dropna().iloc[-1], found.record["metrics"]["test/accuracy"])


def test_its_states_and_models(run: Path) -> None:
    found = open_run(run)
    assert (found.state()["epoch"], found.state("best")["global_step"]) == (1, 8)
    assert found.state(1)["epoch"] == 1  # epochs count from 0
    with pytest.raises(UsageError, match="has no checkpoint epoch_0005"):
        found.load_models(4)
    state = found.state("best")
    assert set(state["models"]) == {"net"}
    assert all(isinstance(item, torch.Tensor) and "module" not in name for name, item in state["models"]["net"].items())


def test_all_views_agree_on_the_best_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[2])
    path, monitor = str(run / "checkpoints" / "epoch_0001_step_00000008"), "val/cross_entropy"
    value = next(row[monitor] for row in map(json.loads, (run / "metrics.jsonl").open()) if monitor in row)
    record = open_run(run).record
    assert record["best"] == {"epoch": 0, "step": 8, "path": path, "value": value}
    (row,) = listing.list_rows("digits")
    assert [row.fields()[name] for name in ("best", "best_epoch", "best_step", "best_checkpoint")] == [
        value,
        1,
        8,
        path,
    ]
    best = ranking.best("digits")
    assert [best[name] for name in ("value", "epoch", "step", "checkpoint")] == [value, 1, 8, path]
    assert f"{path} (epoch 1, step 8)" in ranking.best_lines(best)[-1]
    shown = f"{value:.4f} (epoch 1, step 8, checkpoints/epoch_0001_step_00000008)\n"
    assert f"best {monitor}  {shown}" in (run.parents[2] / "printed").read_text()
    page = report.render_run(row.folder)
    assert f"{monitor} {value:.4f} (epoch 1, step 8)" in page
    assert re.search(r"epoch_0001_step_00000008</td>\s*<td[^>]*>best</td>", page)
    assert f"Best `{monitor}`: {value:.4f}, in epoch 1, step 8." in card(record, row.folder.conf)


def test_a_copy_names_its_own_checkpoints(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "elsewhere" / "run_001"))
    found, original = open_run(copy).record, open_run(run).record
    for name in ("best", "latest"):
        checkpoint = Path(original[name]["path"]).name
        assert found[name] == original[name] | {"path": str(copy / "checkpoints" / checkpoint)}


def test_its_stored_code_runs_anywhere_but_only_for_those_who_trust_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MlxError, match=r"use the stored code: load_models\(trust=True\)"):
        open_run(run).load_models()
    models = open_run(run).load_models("best", trust=True)
    assert models.net.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert type(models.net).__module__ != "src.models"


def test_code_that_has_changed_since_is_one_line_with_the_way_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(run.parents[2] / "src", tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    found, names = open_run(run), sorted(item.name for item in (run / "checkpoints").iterdir() if item.is_dir())
    datasets = found.load_datasets()
    assert len(datasets.train[0]) == 2
    assert found.load_models(checkpoint=names[0]).net.training
    assert found.state(checkpoint=names[0])["global_step"] == 8
    for name, old, new in (("models", "DigitsNet", "Net"), ("datasets", "class Datasets", "class Data")):
        code = tmp_path / "src" / f"{name}.py"
        code.write_text(code.read_text().replace(old, new))
        shutil.copytree(tmp_path, again := tmp_path.with_name(f"{name}_again"))  # modules are imported once per folder
        monkeypatch.chdir(again)
        with pytest.raises(ConfigError) as caught:
            getattr(found, f"load_{name}")()
        assert str(caught.value).startswith(f"{name} of digits/run_001 cannot be built with the code in {again}: ")
        assert str(caught.value).endswith(f", use the code that the run stored: load_{name}(trust=True)")
        assert "_mlx_code_" not in str(caught.value)
        assert getattr(found, f"load_{name}")(trust=True)
    with pytest.raises(UsageError, match=r"has no checkpoint epoch_0009\. "):
        found.state(checkpoint="epoch_0009")
