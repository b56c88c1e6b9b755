"""Exports prove themselves: what is published answers as `predict` does, and what cannot be exported is located."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from conftest import Mlx, Start, edit
from faults import wait_for
from forkserver import Command
from safetensors.torch import load_file

from mlx_runtime import load_export, open_run
from mlx_runtime.companions.serving.exports import proof
from mlx_runtime.companions.serving.exports.artifact import export
from mlx_runtime.companions.serving.schema import RowError
from mlx_runtime.errors import MlxError, StorageError, UsageError
from mlx_runtime.runs.queries.lookup import resolve_run

pytestmark = pytest.mark.process

NAME = "exports_run_001_epoch_0001"


@pytest.fixture(scope="module")
def trained(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a run, and its export."""
    folder = make_in("exports", tmp_path_factory.mktemp("trained"))
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    done = mlx(folder, "xp", "export", "exports")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["loading", "reading", "tracing", "checking"]
    assert done.stderr.endswith("checking  program.pt2 with rows of test\n")
    assert done.stdout.startswith(f"wrote {NAME}: exports/run_001 epoch_0001 (reads ids, mask, numbers), ")
    assert "pt2 compared with predict on 77 rows of test: at most " in done.stdout
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of that experiment as the working directory, without leaving its modules behind."""
    folder = Path(shutil.copytree(trained, tmp_path / "exports"))
    monkeypatch.chdir(folder)
    before = set(sys.modules)
    path = [*sys.path]
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "src":
            del sys.modules[name]


def copy_kind(folder: Path, kind: str) -> None:
    """Copy the run as run_002, whose encoder is of another kind, with the same weights."""
    shutil.copytree(folder / "runs/exports/run_001", folder / "runs/exports/run_002")
    edit(folder / "runs/exports/run_002/conf.yaml", "kind: plain", f"kind: {kind}")


def test_the_folder_of_an_export(trained: Path) -> None:
    """
    exports_run_001_epoch_0001/
        README.md  examples.safetensors  export.json  program.pt2  schema.json  weights.safetensors
        code/main.py  code/src/  tokenizer/vocabulary.json
    """
    folder = trained / NAME
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    root = {"README.md", "examples.safetensors", "export.json", "program.pt2", "schema.json"}
    sources = ("__init__.py", "conf.schema.json", "conf.yaml", "experiment.py")
    code = {"code/main.py", *(f"code/src/{name}" for name in sources)}
    assert files == {*root, *code, "weights.safetensors", "tokenizer/vocabulary.json"}
    about = json.loads((folder / "export.json").read_text())
    assert set(about["files"]) == files - {"export.json"}
    assert (about["torch"], about["programs"]) == (torch.__version__, ["pt2"])
    assert (about["proof"]["rows_of"], about["proof"]["rows"]) == ("test", 77)
    shapes = [shapes["ids"] for shapes in about["proof"]["shapes"]]
    assert shapes == [[1, 2], [2, 3], [7, 7], [64, 7], [1, 4], [1, 5], [1, 6]]
    assert about["proof"]["tolerance"] == 1e-4
    assert about["proof"]["programs"]["pt2"]["largest_difference"] < 1e-6
    assert json.loads((folder / "schema.json").read_text())["columns"]["ids"] == {"dtype": "int64", "shape": [None]}
    assert "`src.experiment.Texts.collate`" in (folder / "README.md").read_text()
    weights = load_file(folder / "weights.safetensors")
    assert {name.partition(".")[0] for name in weights} == {"encoder", "head"}


def test_a_loaded_export_answers_like_the_run(here: Path) -> None:
    answers = load_export(NAME)
    assert [column.text for column in answers.schema.columns] == ["int64 (any,)", "bool (any,)", "float32 (4,)"]
    rows = [
        {"ids": [1, 2, 3], "mask": [True] * 3, "numbers": [0.5, 1, 2, 3]},
        {"ids": [4] * 12, "mask": [True] * 11 + [False], "numbers": [0, 0, 0, 0]},
    ]
    found, run = answers(rows), open_run("exports/run_001").predictor()
    for number, row in enumerate(rows):
        expected = run.predict(answers.schema.stack([answers.schema.row(row)]))
        assert torch.equal(found["label"][number : number + 1], expected["label"])
        assert torch.allclose(found["scores"][number : number + 1], expected["scores"], atol=1e-6)
    assert answers(answers.schema.example_rows())["label"].shape == (3,)
    with pytest.raises(RowError, match="numbers is missing; expected float32"):
        answers([{"ids": [1], "mask": [True]}])


def test_its_folder_is_served_beside_the_run(trained: Path, start: Start) -> None:
    process = start(trained, "serve", "run", NAME, "run=exports/run_001", "--port", "0")
    assert isinstance(process, Command)
    wait_for(lambda: "\ncurl " in process.output() or process.poll() is not None)
    url = re.findall(r"^http\S+", process.output(), re.MULTILINE)[0]
    example = urllib.request.urlopen(f"{url}/example").read()
    found = []
    for name in (NAME, "run"):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/models/{name}/predict", example, headers)
        found.append(json.load(urllib.request.urlopen(request))["outputs"][0])
    assert found[0]["scores"] == pytest.approx(found[1]["scores"], rel=1e-4)


def flip_the_last_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def replace_by_a_pipe(file: Path) -> None:
    """Reading it would block forever."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("program.pt2", flip_the_last_byte, "program.pt2 is damaged: it is not the file that was exported"),
        ("export.json", Path.unlink, "is not an export: it has no export.json"),
        ("schema.json", replace_by_a_pipe, "cannot read .*schema.json: .*not a regular file"),
    ],
)
def test_a_damaged_export_is_refused(here: Path, file: str, damage: Callable[[Path], None], message: str) -> None:
    damage(here / NAME / file)
    with pytest.raises((StorageError, UsageError), match=message) as raised:
        load_export(here / NAME)
    assert "\n" not in str(raised.value)


def test_an_export_replaces_only_an_export_and_only_with_force(here: Path) -> None:
    run = resolve_run("exports", "run_001")
    with pytest.raises(UsageError, match=f"^{NAME} exists; replace it with --force, or name another folder"):
        export(run)
    (here / "other").mkdir()
    with pytest.raises(UsageError, match="^other exists and is not an export; name"):
        export(run, Path("other"), force=True)
    (here / NAME / "left.txt").touch()
    assert export(run, formats=["safetensors"], force=True, trust=True).startswith(f"wrote {NAME}: ")
    assert not (here / NAME / "left.txt").exists()
    assert not (here / NAME / "program.pt2").exists()
    assert "numbers" in load_file(here / NAME / "examples.safetensors")
    with pytest.raises(UsageError, match="has no program, only weights"):
        load_export(here / NAME)
    assert [file for file in here.iterdir() if ".part-" in file.name or ".old-" in file.name] == []


CANNOT_BE_EXPORTED = {
    "branch": "predict cannot be exported: a condition or a size depends on values of tensors at src/experiment.py:65: "
    'if self.kind == "branch" and hidden.sum() > 0:\na program cannot branch on values of tensors; use '
    "torch.where, a mask, or torch.cond",
    "recurrent": "predict cannot be exported: dimension 1 of 'ids', which varies, is fixed to 7 at "
    "src/experiment.py:68: hidden = self.recurrent(hidden)[0]\nwrite x.shape[1] or -1 instead of a number; recurrent "
    "layers and loops over positions fix a length: pad all rows to one length in the dataset, or export only the "
    "weights with --format safetensors",
    "nan": "predict returns only NaN or infinity in 'scores' for 1 row of ids (4,), mask (4,), numbers (4,): nothing "
    "can be compared; choose another --checkpoint, or let predict return numbers for such rows",
    "dishonest": "the exported program (pt2) differs from predict with 3 rows of ids (",
}
"""Messages by kind of encoder."""


@pytest.mark.parametrize("kind", CANNOT_BE_EXPORTED)
def test_a_model_that_cannot_be_exported_is_located(here: Path, mlx: Mlx, kind: str) -> None:
    copy_kind(here, kind)
    if kind == "recurrent":  # pytest's handlers of logging keep lines from torch's draft of a program
        done = mlx(here, "xp", "export", "exports", "run_002")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(f"error: {CANNOT_BE_EXPORTED[kind]}\n")
    else:
        with pytest.raises(MlxError) as raised:
            export(resolve_run("exports", "run_002"))
        assert str(raised.value).startswith(CANNOT_BE_EXPORTED[kind])
    assert [file.name for file in here.iterdir() if "run_002" in file.name] == []


def test_a_check_that_takes_too_long_is_stopped(here: Path) -> None:
    with pytest.raises(MlxError, match=r"took more than 0.1 s; allow more with --timeout 0.2"):
        export(resolve_run("exports", "run_001"), Path("late"), timeout_s=0.1)
    assert not (here / "late").exists()


def test_code_with_a_secret_is_not_exported(here: Path) -> None:
    with zipfile.ZipFile(here / "runs/exports/run_001/code.zip", "a") as archive:
        archive.writestr("src/keys.py", 'API_KEY = "sk-ant-abcdef1234567890"\n')
    with pytest.raises(UsageError, match=r"^src/keys.py:1 would take a likely secret to the export. Read it from the"):
        export(resolve_run("exports", "run_001"), Path("secret"), formats=["safetensors"])
    assert not (here / "secret").exists()


@pytest.mark.pure
def test_the_readme_has_the_tolerance_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text('```python\noutputs = {"y": [1.015]}\n```\n')
    monkeypatch.chdir(tmp_path)
    proof.run_readme({"y": torch.ones(1)}, 2e-2)
    with pytest.raises(proof.ProofError, match=r"block 1: y by 0.015, with a tolerance of 0.01"):
        proof.run_readme({"y": torch.ones(1)}, 1e-2)


ALONE = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock")
"""What `pip install torch` installs; NumPy is optional."""

WITH_ONNX = ("onnxruntime", "numpy", "numpy.libs", "flatbuffers", "google", "packaging", "safetensors")
"""What `pip install onnxruntime safetensors` installs."""


def environment_with(names: Sequence[str], folder: Path) -> Path:
    """Return the Python of a new environment with some packages only, linked from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in (*names, "typing_extensions.py"):
        (site / name).symlink_to(Path(torch.__file__).parents[1] / name)
    return folder / "bin/python"


def code_of(folder: Path, title: str) -> str:
    """Return the code below a title of the README of an export."""
    return (folder / "README.md").read_text().partition(title)[2].partition("```python\n")[2].partition("```")[0]


@pytest.mark.install
def test_the_code_of_the_readme_runs_in_an_environment_with_torch_only(trained: Path, tmp_path: Path) -> None:
    folder, alone = trained / NAME, environment_with(ALONE, tmp_path / "alone")
    code = code_of(folder, "## Run program.pt2")
    assert 0 < len(code.splitlines()) <= 10
    done = subprocess.run([alone, "-c", code], cwd=folder, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "label (3,) torch.int64\nscores (3, 3) torch.float32\n"
    done = subprocess.run([alone, "-c", "import mlx_runtime"], cwd=folder, capture_output=True, text=True, env={})
    assert done.stderr.endswith("No module named 'mlx_runtime'\n")


@pytest.mark.install
def test_all_formats_are_compared_with_predict(trained: Path, mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(trained, "xp", "export", "exports", "-o", "all", "--format", "pt2,onnx")
    assert done.returncode == 0, done.stderr
    found = json.loads((trained / "all/export.json").read_text())["proof"]["programs"]
    assert {name: item["largest_difference"] < 1e-5 for name, item in found.items()} == dict.fromkeys(found, True)
    assert set(found) == {"pt2", "onnx"}
    row = load_export(trained / "all").schema.example_rows()[0]
    label = {int(load_export(trained / "all", name)([row])["label"]) for name in found}
    assert len(label) == 1
    alone, code = environment_with(WITH_ONNX, tmp_path / "alone"), code_of(trained / "all", "## Run program.onnx")
    done = subprocess.run([alone, "-c", code], cwd=trained / "all", capture_output=True, text=True, env={})
    assert (done.returncode, done.stdout) == (0, "label (3,) int64\nscores (3, 3) float32\n"), done.stderr
    done = subprocess.run([alone, "-c", "import torch"], capture_output=True, text=True, env={})
    assert done.stderr.endswith("No module named 'torch'\n")
