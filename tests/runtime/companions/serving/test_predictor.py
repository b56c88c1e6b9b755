"""Answers of stored runs, in Python."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Mlx, Script, edit

from mlx_runtime import open_run
from mlx_runtime.companions.serving.loading import choose_checkpoint
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def answers(make_in: Callable[[str, Path], Path], mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment with two inputs, two models and a tool, trained with two checkpoints."""
    folder = make_in("answers", tmp_path_factory.mktemp("answers"))
    done = mlx(folder, "train", "run", "cfg.num_epochs=2", "cfg.monitor=val/right", "cfg.mode=max")
    assert (done.returncode, "predict fails" in done.stdout) == (0, False), done.stderr
    return folder


@pytest.fixture
def predictor(answers: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    monkeypatch.chdir(answers)
    return open_run("answers/run_001").predictor("latest")


def test_its_answers_are_those_of_the_models_of_the_checkpoint(predictor: Predictor) -> None:
    rows = [{"tokens": [3, 4], "age": 0.5}, {"tokens": [5, 6, 7], "age": 1.5}, {"tokens": [1, 2], "age": 2}]
    logits = predictor(rows)["logits"]
    models = open_run("answers/run_001").load_models("latest")
    for row, answer in zip(rows, logits, strict=True):
        words = models.words(torch.tensor([row["tokens"]]))
        age = torch.tensor([[row["age"] - 1.15]])  # the mean that the tool had in training
        assert torch.allclose(models.head(torch.cat([words, age], dim=1))[0], answer, atol=1e-6)
    first = open_run("answers/run_001").predictor(checkpoint="epoch_0001")(rows)["logits"]
    assert not torch.allclose(first, logits, atol=1e-4)


def test_the_checkpoint_is_the_best_one_by_default(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(answers)
    run = open_run("answers/run_001")
    best = run.record["best"]["path"].rpartition("/")[2]
    assert run.predictor().title == f"answers/run_001 {best}"
    with pytest.raises(UsageError, match="has no checkpoint epoch_0009"):
        run.predictor("epoch_0009")
    path = answers / "runs" / "answers" / "run_001" / "checkpoints" / "epoch_0001"
    assert run.predictor(str(path)).title == "answers/run_001 epoch_0001"
    with pytest.raises(UsageError, match=f"{path} is a checkpoint of answers/run_001, not of answers/run_002"):
        choose_checkpoint(RunFolder(path.parents[1].with_name("run_002")), str(path))


def test_examples_never_run_code(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(answers, tmp_path / "answers"))
    monkeypatch.chdir(folder)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit",)

    torch.save({"val": Evil()}, folder / "runs" / "answers" / "run_001" / "examples.pt")
    with pytest.raises(StorageError, match=r"run_001/examples\.pt is damaged: "):
        open_run(folder / "runs" / "answers" / "run_001").predictor()


def test_an_experiment_that_cannot_answer(answers: Path, tmp_path: Path, script: Script) -> None:
    folder = Path(shutil.copytree(answers, tmp_path / "answers"))
    edit(folder / "src" / "experiment.py", '(batch["age"] -', '(batch["weight"] -')
    found = script(
        folder,
        "import json, mlx_runtime\n"
        "try: mlx_runtime.open_run('answers/run_001').predictor()\n"
        "except mlx_runtime.MlxError as error: print(json.dumps({type(error).__name__: str(error)}))\n",
    )
    ((raised, text),) = found.items()
    assert raised == "PredictError"
    assert "text, tokens, age, label: KeyError: 'weight' (src/" in text


def test_the_stored_code_answers_from_anywhere(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = open_run(answers / "runs" / "answers" / "run_001")
    with pytest.raises(UsageError, match="is not the experiment of answers/run_001"):
        run.predictor()
    assert run.predictor(trust=True)([{"tokens": [1], "age": 1}])["label"].shape == (1,)


def test_a_run_warns_that_predict_fails(answers: Path, mlx: Mlx, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(answers, tmp_path / "answers"))
    edit(folder / "src" / "experiment.py", '{"label": self.logits(batch).argmax(1), ', '{"w": batch["weight"], ')
    done = mlx(folder, "train", "run", "--quiet", "cfg.start_workers=2")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "predict fails" in line]
    assert line.startswith("warning   predict fails on rows of val in this run, whose columns are text, tokens, ")
    assert ": KeyError: 'weight' (src/experiment.py:" in line
