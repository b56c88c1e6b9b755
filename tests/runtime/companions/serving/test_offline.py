"""`mlx train predict` for a trained experiment: datasets and files, processes, interruptions and errors."""

import fcntl
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from conftest import Mlx, Start, edit
from faults import wait_for
from pyarrow import parquet

from mlx_runtime import open_run
from mlx_runtime.companions.serving.predictions.offline import Options, predict
from mlx_runtime.companions.serving.predictor import PredictError
from mlx_runtime.companions.serving.schema import RowError
from mlx_runtime.errors import DatasetError, MlxError, StorageError, UsageError

pytestmark = pytest.mark.local

MORE_DATASETS = '''"""Datasets besides those of the experiment."""

import os
import time
from pathlib import Path

from torch.utils.data import IterableDataset

from src.datasets import Digits


class Slow(Digits):
    """Reads slowly while there is a file of this name, especially after some rows, and records its process."""

    count = 0

    def __init__(self):
        super().__init__(split="test")

    def __getitem__(self, index):
        if Path("slow").exists():
            Path(f"reader_{os.getpid()}").touch()
            Slow.count += 1
            time.sleep(0.02 if Slow.count < 100 else 1)
        return super().__getitem__(index)


class Stream(IterableDataset):
    batch_size = 8

    def __init__(self, rows=270):
        self.rows, self.digits = rows, Digits(split="test")

    def __iter__(self):
        return (self.digits[number] for number in range(self.rows))

    ray_map_batches = staticmethod(Digits.ray_map_batches)


class Broken(Digits):
    def __init__(self):
        super().__init__(split="test")

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("no such scan")
        return super().__getitem__(index)
'''

CHECKED_PREDICT = '''    def predict(self, batch):
        """Answer a batch without labels; `make predict`, `mlx xp export` and `mlx serve` call this."""
        if self.tools.best.epoch is None:
            raise ValueError("the tools are not those of the checkpoint")
        if (batch["image"] > 1).any():
            raise ValueError("too bright")
'''


@pytest.fixture(scope="module")
def trained(bound: Path, mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with one run, whose predict refuses images brighter than 1."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("predict") / "digits"))
    (folder / "src" / "more.py").write_text(MORE_DATASETS)
    code = (folder / "src" / "experiment.py").read_text()
    start = code.index("    def predict(")
    body = code.index("        probabilities = ", start)
    (folder / "src" / "experiment.py").write_text(code[:start] + CHECKED_PREDICT + code[body:])
    done = mlx(folder, "train", "run", "cfg.num_epochs=1", "cfg.start_workers=0")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def run(trained: Path) -> str:
    return str(trained / "runs" / "digits" / "run_001")


@pytest.fixture(scope="module")
def images(run: str) -> np.ndarray:
    """The images of the test set, (270, 1, 8, 8) float32."""
    images: np.ndarray = open_run(run).load_datasets(trust=True).test.images.numpy()
    return images


@pytest.fixture(scope="module")
def expected(run: str, images: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs for the test set in Python."""
    outputs = open_run(run).predictor(trust=True)({"image": images})
    return {name: value.numpy() for name, value in outputs.items()}


@pytest.fixture
def quick(run: str, tmp_path: Path) -> Callable[..., Path]:
    """`quick("out.parquet", dataset=...)` predicts in this process, with the stored code."""

    def quick(name: str = "out.parquet", **options: Any) -> Path:
        predict(run, tmp_path / name, Options(trust=True, **options))
        assert [path for path in tmp_path.iterdir() if path.name.endswith(".parts")] == []
        return tmp_path / name

    return quick


def probabilities(path: Path) -> np.ndarray:
    return np.stack(pandas.read_parquet(path)["probabilities"])


def test_the_command_answers_as_the_predictor_and_the_evaluation_do(
    trained: Path, run: str, mlx: Mlx, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    output = tmp_path / "out.parquet"
    done = mlx(trained, "train", "predict", "run_001", "-o", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {output}: 270 rows of digit, probabilities, in ")
    assert done.stdout.endswith(" by digits/run_001 epoch_0001\n")
    assert done.stderr.startswith("predicting with digits/run_001 epoch_0001 on test\n")
    frame = pandas.read_parquet(output)
    assert list(frame) == ["digit", "probabilities"]
    assert np.array_equal(frame["digit"], expected["digit"])
    assert np.array_equal(probabilities(output), expected["probabilities"])
    labels = open_run(run).load_datasets(trust=True).test.labels.numpy()
    metrics = open_run(run).record["metrics"]
    assert (frame["digit"] == labels).mean() == pytest.approx(metrics["test/accuracy"])
    again = mlx(trained, "train", "predict", "run_001", "-o", str(output))
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {output} exists; replace it with --force, or name another file with -o\n",
    )


def test_a_run_warns_that_predict_fails(trained: Path, mlx: Mlx, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "digits"))
    edit(folder / "src" / "experiment.py", '(batch["image"] > 1)', '(batch["weight"] > 1)')
    done = mlx(folder, "train", "run", "--quiet", "cfg.num_epochs=1", "cfg.start_workers=2")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "predict fails" in line]
    assert line.startswith("warning   predict fails on rows of ")
    assert ": KeyError: 'weight' (src/experiment.py:" in line


def test_the_stored_code_answers_from_anywhere_if_it_is_trusted(run: str) -> None:
    with pytest.raises(UsageError, match="is not the experiment of digits/run_001"):
        open_run(run).predictor()
    rows = open_run(run).predictor(trust=True).schema.example_rows()
    assert open_run(run).predictor(trust=True)(rows[:2])["digit"].shape == (2,)


def test_examples_never_run_code(run: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "digits" / "run_001"))

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit",)

    torch.save({"val": Evil()}, folder / "examples.pt")
    with pytest.raises(StorageError, match=r"run_001/examples\.pt is damaged: "):
        open_run(folder).predictor(trust=True)


def test_each_number_of_workers_and_kind_of_dataset_gives_the_same_bytes(
    trained: Path, mlx: Mlx, quick: Callable[..., Path], expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    one = quick("one.parquet", dataset="test", batch_size=8)
    np.testing.assert_allclose(probabilities(one), expected["probabilities"], rtol=1e-4, atol=1e-6)
    stream = quick("stream.parquet", dataset="src.more.Stream", batch_size=8)
    assert stream.read_bytes() == one.read_bytes()
    output = tmp_path / "three.parquet"
    options = ("--workers", "3", "--batch-size", "8", "-o", str(output), "--quiet")
    done = mlx(trained, "train", "predict", "--dataset", "src.more.Stream", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert output.read_bytes() == one.read_bytes()


def test_files_of_rows_give_the_same_outputs(
    quick: Callable[..., Path], images: np.ndarray, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    ids = [f"row {number}" for number in range(270)]
    parquet.write_table(pa.table({"id": ids, "image": images.tolist()}), tmp_path / "in.parquet")
    rows = [{"image": image.tolist(), "id": name} for image, name in zip(images, ids, strict=True)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "parts").mkdir()
    for number, part in enumerate((slice(0, 100), slice(100, 270))):
        table = pa.table({"id": ids[part], "image": images[part].tolist()})
        parquet.write_table(table, tmp_path / f"parts/{number}.parquet", row_group_size=70)
    for name in ("in.parquet", "in.jsonl", "parts"):
        output = quick(f"{name}.parquet", dataset=str(tmp_path / name), keep=("id",))
        assert np.array_equal(probabilities(output), expected["probabilities"]), name
        assert list(pandas.read_parquet(output)["id"]) == ids
    output = quick("out.jsonl", dataset=str(tmp_path / "in.parquet"))
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert np.array_equal(np.array([row["probabilities"] for row in found], np.float32), expected["probabilities"])


def parts_of(output: Path) -> list[Path]:
    return sorted(output.with_name(f".{output.name}.parts").glob("[0-9]*.arrow"))


@pytest.fixture
def slow(trained: Path) -> Iterator[Path]:
    """Make the dataset `Slow` slow during the test."""
    (trained / "slow").touch()
    yield trained
    (trained / "slow").unlink(missing_ok=True)
    for path in trained.glob("reader_*"):
        path.unlink()


@pytest.mark.kills
def test_an_interrupted_command_continues(
    slow: Path, start: Start, quick: Callable[..., Path], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C, and then after it was killed with two workers."""
    output = tmp_path / "out.parquet"
    same = {"dataset": "src.more.Slow", "batch_size": 2}
    command = ("--code", "stored", "--dataset", str(same["dataset"]), "--batch-size", "2", "-o", str(output))
    process = start(slow, "train", "predict", run, *command)
    wait_for(lambda: parts_of(output), 240)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=120)[1]
    assert (process.returncode, "to continue, type the same command again" in stderr) == (130, True), stderr
    interrupted, ended = len(parts_of(output)), {*readers(slow)}
    process = start(slow, "train", "predict", run, *command, "--workers", "2")
    wait_for(lambda: len(parts_of(output)) > interrupted, 240)
    process.kill()
    process.wait()
    assert {*readers(slow)} - ended
    wait_for(lambda: not any(running(pid) for pid in readers(slow)), 120)  # they end with what started them
    with output.with_name(f".{output.name}.parts").joinpath("lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process that started them has ended, too
    assert not output.exists()
    (slow / "slow").unlink()
    rows = sum(int(path.stem.partition("-")[2]) for path in parts_of(output))
    assert 0 < rows < 270
    quick("out.parquet", **same)
    assert f" on src.more.Slow, continuing after {rows} rows\n" in capsys.readouterr().err
    whole = quick("whole.parquet", **same)
    assert output.read_bytes() == whole.read_bytes()


def readers(folder: Path) -> list[int]:
    """Return the processes that have read rows."""
    return [int(path.name.partition("_")[2]) for path in folder.glob("reader_*")]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ERRORS: dict[str, tuple[dict[str, Any], type[MlxError], str]] = {
    "an unknown dataset": ({"dataset": "tst"}, UsageError, r"no dataset 'tst', .*Did you mean 'test'\?"),
    "a dataset that fails": (
        {"dataset": "src.more.Broken"},
        DatasetError,
        r"cannot be read: ValueError: no such scan \(while reading sample 13 ",
    ),
    "no such checkpoint": ({"checkpoint": "epoch_0009"}, UsageError, "has no checkpoint epoch_0009"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_leave_nothing_behind(name: str, run: str, tmp_path: Path) -> None:
    options, error, message = ERRORS[name]
    with pytest.raises(error, match=message) as caught:
        predict(run, tmp_path / "out.parquet", Options(trust=True, **options))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_row_on_which_predict_fails_is_named(run: str, images: np.ndarray, tmp_path: Path) -> None:
    def rows(images: np.ndarray) -> str:
        parquet.write_table(pa.table({"image": images.tolist()}), tmp_path / "in.parquet")
        return str(tmp_path / "in.parquet")

    dataset = rows(np.concatenate([images[:20], images[:1] + 5]))
    with pytest.raises(PredictError, match=r"in.parquet: row 20: predict failed: ValueError: too bright \(src/exp"):
        predict(run, tmp_path / "out.parquet", Options(dataset=dataset, batch_size=1, trust=True))
    assert len(parts_of(tmp_path / "out.parquet")) == 2
    part = images[:20].copy()
    part[3, 0, 0, 0] = np.nan
    with pytest.raises(RowError, match=r"in.parquet: row 3: image holds NaN or infinity; expected finite numbers"):
        predict(run, tmp_path / "out.parquet", Options(dataset=rows(part), trust=True))


IN_A_PROCESS = """
import resource, signal, sys
from pathlib import Path
from mlx_runtime.companions.serving.predictions.offline import Options, predict
from mlx_runtime.errors import MlxError
run, folder, limit = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    options = Options(dataset=str(Path(folder, "in.parquet")), keep=("id",), batch_size=64, trust=True)
    predict(run, Path(folder, "out.parquet"), options)
except MlxError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


@pytest.mark.kills
def test_a_full_disk(python: Mlx, run: str, images: np.ndarray, tmp_path: Path) -> None:
    table = pa.table({"image": images.tolist(), "id": [f"{number:01000d}" for number in range(270)]})
    parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "limited.py").write_text(IN_A_PROCESS)
    done = python(tmp_path, "limited.py", run, str(tmp_path), str(1 << 17))
    output = tmp_path / "out.parquet"
    assert done.returncode == StorageError.exit_code
    wanted = f"StorageError cannot write {output}: File too large; to continue, type the same"
    assert done.stdout.startswith(wanted), done.stdout + done.stderr
    assert not output.exists()
