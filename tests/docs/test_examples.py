"""The examples in the docs train, and reach the results promised by their docstrings."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Mlx, Script, bind

from mlx_runtime import open_run

pytestmark = pytest.mark.examples

Make = Callable[[str], Path]


@pytest.fixture
def example(mlx: Mlx, baked: Path, tmp_path: Path) -> Make:
    """`example("gan")` creates an experiment with that file as its src/experiment.py, and binds it."""

    def make(name: str) -> Path:
        folder = Path(shutil.copytree(baked, tmp_path / name))
        shutil.copy(ROOT / "docs" / "examples" / f"{name}.py", folder / "src" / "experiment.py")
        return bind(mlx, folder)

    return make


def answers(script: Script, folder: Path, name: str, rows: list[dict[str, Any]], output: str) -> list[Any]:
    """Return an output of `predict` for rows, from a process of its own."""
    return list(
        script(
            folder,
            "import json, mlx_runtime\n"
            f"predictor = mlx_runtime.open_run('{name}/run_001').predictor()\n"
            f"print(json.dumps({{'found': predictor({rows})['{output}'].tolist()}}))\n",
        )["found"]
    )


def lines(run: Path) -> list[dict[str, float]]:
    """Return the metrics by step, without times and rates."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = [{key: value for key, value in line.items() if "/" in key or key == "step"} for line in found]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in named]


@pytest.mark.pure
def test_every_example_is_listed_and_tested() -> None:
    page = (ROOT / "docs" / "guides" / "examples.md").read_text()
    for file in (ROOT / "docs" / "examples").glob("*.py"):
        assert f"../examples/{file.name}" in page
        assert f'example("{file.stem}")' in Path(__file__).read_text()


def test_the_generator_reaches_all_modes(mlx: Mlx, example: Make, script: Script) -> None:
    folder = example("gan")
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    modes = [line["ring/modes"] for line in lines(folder / "runs" / "gan" / "run_001") if "ring/modes" in line]
    assert len(modes) == 30
    assert modes[-1] == 8
    found = answers(script, folder, "gan", [{"noise": [0.1] * 16}, {"noise": [-1.0] * 16}], "point")
    assert all(0.5 < math.hypot(*point) < 1.5 for point in found)


def test_digits_are_sorted_by_a_model_in_two_stages(mlx: Mlx, example: Make) -> None:
    folder = example("sorter")
    done = mlx(folder, "train", "run", "cfg.num_epochs=4")
    assert done.returncode == 0, done.stderr
    assert "sharded   net: pipeline of 2 stages with 3 + 4 blocks" in done.stdout
    assert open_run(folder / "runs" / "sorter" / "run_001").record["metrics"]["val/sorted"] > 0.95


def test_texts_of_any_length_are_told_apart(mlx: Mlx, example: Make, script: Script) -> None:
    folder = example("text")
    assert "longest: 64" in (folder / "src" / "conf.yaml").read_text()
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    assert open_run(folder / "runs" / "text" / "run_001").record["metrics"]["val/accuracy"] > 0.95
    texts = ("the film is a delight", "this book is dull", "her new song is badly made", "the film is moving")
    rows = [{"tokens": [1 + byte for byte in text.encode()]} for text in texts]
    assert [value > 0.5 for value in answers(script, folder, "text", rows, "praise")] == [True, False, False, True]


def test_two_training_sets_are_read_side_by_side(mlx: Mlx, example: Make) -> None:
    folder = example("semi")
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = lines(folder / "runs" / "semi" / "run_001")
    assert [line["step"] for line in found if "train/loss" in line] == [15 * epoch for epoch in range(1, 21)]
    assert not any(name.startswith("unlabelled/") for line in found for name in line)
    assert [line["val/accuracy"] for line in found if "val/accuracy" in line][-1] > 0.9


def test_a_sharded_gpt_learns_the_words_of_its_text(mlx: Mlx, example: Make) -> None:
    folder = example("gpt")
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = open_run(folder / "runs" / "gpt" / "run_001")
    assert run.record["metrics"]["val/loss"] < 2
    assert run.state()["models"]["net"]["characters.weight"].shape == (27, 64)


def test_fine_tuning_starts_from_weights_with_other_names_and_resumes_exactly(
    mlx: Mlx, example: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = example("finetune")
    shapes = {"0.weight": (32, 1, 3, 3), "0.bias": (32,), "4.weight": (32, 128), "4.bias": (32,)}
    weights = {f"encoder.{name}": torch.randn(shape) / 10 for name, shape in shapes.items()}
    torch.save({**weights, "decoder.weight": torch.zeros(3)}, folder / "weights.pt")
    pretrained = f"models.net.pretrained={folder}/weights.pt"
    short = mlx(folder, "train", "run", pretrained, "cfg.num_epochs=2")
    assert short.returncode == 0, short.stderr
    run = open_run(folder / "runs" / "finetune" / "run_001")
    frozen = run.state()["models"]["net"]
    assert all(torch.equal(frozen[f"backbone.{name.partition('.')[2]}"], item) for name, item in weights.items())

    resumed = mlx(folder, "train", "run", "--resume=run_001", "cfg.num_epochs=4")
    assert resumed.returncode == 0, resumed.stderr
    whole = mlx(folder, "train", "run", pretrained, "cfg.num_epochs=4")
    assert whole.returncode == 0, whole.stderr
    numbers = [lines(folder / "runs" / "finetune" / name) for name in ("run_001", "run_002")]
    assert len(numbers[1]) > 12
    assert numbers[0] == numbers[1]

    monkeypatch.chdir(folder)
    net = run.load_models().net
    averaged = torch.optim.swa_utils.AveragedModel(net)
    averaged.load_state_dict(run.state()["own"]["ema"])
    assert not torch.equal(averaged.module.head.weight, net.head.weight)


def test_a_language_model_carries_its_state(mlx: Mlx, example: Make) -> None:
    folder = example("lm")
    conf = folder / "src" / "conf.yaml"
    bound = conf.read_text()
    train, rest = bound.split("  val:\n")
    conf.write_text(f"{train}  val:\n{rest.replace('vocabulary: 1000', 'vocabulary: ${datasets.train.vocabulary}')}")
    assert conf.read_text().count("${datasets.train.vocabulary}") == 2
    assert mlx(folder, "train", "bind", "--check").returncode == 0
    size = "datasets.train.vocabulary=800"
    whole = mlx(folder, "train", "run", size, "cfg.max_steps=200")
    assert (whole.returncode, whole.stderr) == (0, ""), whole.stdout
    assert " tokens/s " in whole.stdout
    found = lines(folder / "runs" / "lm" / "run_001")
    assert [line["step"] for line in found if "val/cross_entropy" in line] == [80, 160]
    run = open_run(folder / "runs" / "lm" / "run_001")
    assert run.record["metrics"]["val/cross_entropy"] < 3
    assert "tokens_per_s" in run.metrics()


def test_a_policy_learns_without_a_dataset(mlx: Mlx, example: Make) -> None:
    folder = example("rl")
    whole = mlx(folder, "train", "run", "cfg.num_epochs=6")
    assert (whole.returncode, whole.stderr) == (0, ""), whole.stdout
    run = folder / "runs" / "rl" / "run_001"
    lengths = {line["step"]: line["train/length"] for line in lines(run) if "train/length" in line}
    assert [*lengths] == [*range(5, 35, 5)]
    assert lengths[30] > 3 * lengths[5]
    assert open_run(run).record["epoch"] == 5  # from 0


@pytest.mark.parametrize(("name", "compares"), [("lm", True), ("rl", False), ("text", True)])
def test_examples_resume_exactly_and_do_not_depend_on_the_number_of_workers(
    name: str, compares: bool, mlx: Mlx, example: Make
) -> None:
    """Workers draw the episodes of `rl` themselves, so their numbers cannot be compared."""
    folder = example(name)
    done = mlx(folder, "train", "prove", "--json", "--seed=2", "--kills=1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check["holds"] for check in json.loads(done.stdout)["checks"]}
    assert found == {"deterministic": True, "resume": True, "workers": True if compares else None}
    assert not (folder / "runs").exists()
