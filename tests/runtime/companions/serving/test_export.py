"""Exports prove themselves: what is published answers as `predict` does, and what cannot be exported is located."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from conftest import MAIN, Mlx, edit
from safetensors.torch import load_file

from mlx_runtime import load_export, open_run
from mlx_runtime.companions.serving.exports import instructions, proof
from mlx_runtime.companions.serving.schema import Column, RowError, Schema
from mlx_runtime.errors import StorageError, UsageError

pytestmark = pytest.mark.process

NAME = "exports_run_001_epoch_0001"


@pytest.fixture(scope="module")
def trained(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a run, and its export in three formats that need no other library than torch."""
    folder = make_in("exports", tmp_path_factory.mktemp("trained"))
    (folder / "LICENSE").write_text("\nMIT License\n\nCopyright\n")
    done = mlx(folder, "train", "run")
    assert done.returncode == 0, done.stderr
    done = mlx(folder, "xp", "export", "exports", "--format", "pt2,safetensors")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["loading", "tracing", "checking", "checking"]
    assert done.stderr.endswith("checking  program.pt2 with rows of test\n")
    assert done.stdout.startswith(f"wrote {NAME}: exports/run_001 epoch_0001 (reads ids, mask, numbers), ")
    assert "pt2 compared with predict on 74 rows of test: at most " in done.stdout
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


def export_kind(mlx: Mlx, folder: Path, kind: str, *arguments: str) -> "CompletedProcess[str]":
    """Export a copy of the run whose encoder is of another kind, with the same weights."""
    shutil.copytree(folder / "runs/exports/run_001", folder / "runs/exports/run_002")
    edit(folder / "runs/exports/run_002/conf.yaml", "kind: plain", f"kind: {kind}")
    return mlx(folder, "xp", "export", "exports", "run_002", *arguments)


def test_the_folder_of_an_export(trained: Path) -> None:
    """
    exports_run_001_epoch_0001/
        LICENSE  README.md  examples.safetensors  export.json  program.pt2  schema.json  weights.safetensors
        code/LICENSE  code/main.py  code/src/  tokenizer/vocabulary.json
    """
    folder = trained / NAME
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    root = {"LICENSE", "README.md", "examples.safetensors", "export.json", "program.pt2", "schema.json"}
    sources = ("__init__.py", "conf.schema.json", "conf.yaml", "experiment.py")
    code = {"code/LICENSE", "code/main.py", *(f"code/src/{name}" for name in sources)}
    assert files == {*root, *code, "weights.safetensors", "tokenizer/vocabulary.json"}
    about = json.loads((folder / "export.json").read_text())
    assert set(about["files"]) == files - {"export.json"}
    assert (about["license"], about["torch"], about["programs"]) == ("MIT License", torch.__version__, ["pt2"])
    assert about["proof"]["rows_of"] == "test"
    assert about["proof"]["batch_sizes"] == [1, 2, 7, 64]
    assert about["proof"]["shapes"]["1"]["ids"] == [1, 2]
    assert about["proof"]["tolerance"] == 1e-4
    assert about["proof"]["programs"]["pt2"]["largest_difference"] < 1e-6
    assert about["inputs"]["ids"] == [[1, None], [1, None]]
    assert json.loads((folder / "schema.json").read_text())["columns"]["ids"] == {"dtype": "int64", "shape": [None]}
    assert "`Texts.collate` of `src/experiment.py`, line 48" in (folder / "README.md").read_text()


def test_the_readme_builds_the_models_from_the_code(trained: Path) -> None:
    text = (trained / NAME / "README.md").read_text()
    assert "'encoder': src.experiment.Encoder(kind='plain')" in text
    weights = load_file(trained / NAME / "weights.safetensors")
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
    assert load_export(NAME)(answers.schema.example_rows())["label"].shape == (3,)
    with pytest.raises(RowError, match="numbers is missing; expected float32"):
        answers([{"ids": [1], "mask": [True]}])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("program.pt2", b"\xff", "program.pt2 is damaged: it is not the file that was exported"),
        ("examples.safetensors", b"\xff", "examples.safetensors is damaged: it is not the file"),
        ("export.json", b"[]", "export.json is damaged: "),
        ("export.json", None, "is not an export: it has no export.json"),
        ("schema.json", None, "cannot read .*schema.json: "),
    ],
)
def test_a_damaged_export_is_refused(here: Path, file: str, damage: bytes | None, message: str) -> None:
    path = here / NAME / file
    path.unlink() if damage is None else path.write_bytes(path.read_bytes()[:-1] + damage)
    with pytest.raises((StorageError, UsageError), match=message) as raised:
        load_export(here / NAME)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", ["schema.json", "program.pt2", "examples.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(here: Path, file: str) -> None:
    """Reading it would block forever."""
    (here / NAME / file).unlink()
    os.mkfifo(here / NAME / file)
    with pytest.raises(StorageError, match=f"cannot read .*{file}: .*not a regular file"):
        load_export(here / NAME)


def test_an_export_whose_hash_was_rewritten_is_refused_if_its_content_is_damaged(here: Path) -> None:
    from mlx_runtime.companions.serving.exports.exported import sha256_of

    for file, message in (
        ("program.pt2", "program.pt2 does not load: "),
        ("examples.safetensors", "examples.safetensors is damaged: its header has"),
        ("schema.json", "schema.json is damaged: "),
    ):
        folder = Path(shutil.copytree(here / NAME, here / f"damaged_{file}"))
        (folder / file).write_bytes(b"\xff" * 64)
        about = json.loads((folder / "export.json").read_text())
        about["files"][file] = {"size_bytes": 64, "sha256": sha256_of(folder / file)[0]}
        (folder / "export.json").write_text(json.dumps(about))
        with pytest.raises(StorageError, match=message):
            load_export(folder)
    (here / NAME / "examples.json").write_text('{"text": ["x"]}')
    with pytest.raises(StorageError, match=r"export.json is damaged: it does not list examples.json"):
        load_export(here / NAME)


def test_an_export_replaces_only_an_export_and_only_with_force(here: Path, mlx: Mlx) -> None:
    done = mlx(here, "xp", "export", "exports")
    line = f"error: {NAME} exists; replace it with --force, or name another folder with --output\n"
    assert (done.returncode, done.stderr) == (2, line)
    (here / "other").mkdir()
    done = mlx(here, "xp", "export", "exports", "-o", "other", "--force")
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, "error: other exists and is not an export")
    (here / NAME / "left.txt").touch()
    done = mlx(here, "xp", "export", "exports", "--format", "safetensors", "--force", "--code", "stored")
    assert done.returncode == 0, done.stderr
    assert not (here / NAME / "left.txt").exists()
    assert not (here / NAME / "program.pt2").exists()
    assert "numbers" in load_file(here / NAME / "examples.safetensors")
    with pytest.raises(UsageError, match="has no program, only weights"):
        load_export(here / NAME)
    assert [file for file in here.iterdir() if ".part-" in file.name or ".old-" in file.name] == []


BATCH = "write x.shape[0] or -1 instead of a number; int(), loops over rows, and conditions on their number fix it"


@pytest.mark.parametrize(
    ("kind", "code", "lines"),
    [
        (
            "fixed",
            1,
            "predict cannot be exported: it fails with 1 row: shape '[3, -1, 8]' is invalid for input of size 16 at "
            f"src/experiment.py:68: hidden = hidden.view(3, -1, WIDTH)\n{BATCH}",
        ),
        (
            "whole",
            1,
            "predict cannot be exported: the number of rows is fixed at src/experiment.py:70: hidden = hidden + "
            f"torch.zeros(int(ids.shape[0]), 1, 1)\n{BATCH}",
        ),
        (
            "few",
            1,
            "predict cannot be exported: only batches of 3 or more rows of 'ids' take this path at "
            f'src/experiment.py:73: if self.kind == "few" and ids.shape[0] > 2:\n{BATCH}',
        ),
        (
            "branch",
            1,
            "predict cannot be exported: a condition or a size depends on values of tensors at src/experiment.py:71: "
            'if self.kind == "branch" and hidden.sum() > 0:\na program cannot branch on values of tensors; use '
            "torch.where, a mask, or torch.cond",
        ),
        (
            "recurrent",
            1,
            "predict cannot be exported: dimension 1 of 'ids', which varies, is fixed to 7 at src/experiment.py:80: "
            "hidden = self.recurrent(hidden)[0]\nwrite x.shape[1] or -1 instead of a number; recurrent layers and "
            "loops over positions fix a length: pad all rows to one length in the dataset, or export only the weights "
            "with --format safetensors",
        ),
        (
            "packed",
            1,
            "predict cannot be exported: TypeError: zeros(): argument 'size' failed to unpack the object at pos 2 with "
            'error "type must be tuple of ints,but got FakeTensor" at src/experiment.py:83: return '
            "self.recurrent(packed)[1][-1]\na program cannot read packed sequences; pad all rows to one length in the "
            "dataset, and mask the outputs of the layer, or export only the weights with --format safetensors",
        ),
        (
            "numpy",
            1,
            "predict cannot be exported: RuntimeError: .numpy() is not supported for tensor subclasses. at "
            "src/experiment.py:76: hidden = torch.from_numpy(hidden.numpy() * 2)\nwrite it with operations of torch on "
            "tensors, without NumPy, and without attributes that predict changes",
        ),
        (
            "random",
            1,
            "predict returns different values of 'label' each time, because it draws random numbers, so that the "
            'export cannot be compared; let the dataset yield them as a column, and read it: batch["noise"]',
        ),
        (
            "nan",
            1,
            "predict returns only NaN or infinity in 'scores', for 64 rows of test: nothing can be compared; choose "
            "another --checkpoint",
        ),
        (
            "strings",
            2,
            "predict reads 'text', a column of strings, which programs cannot read; tokenize it in ray_map_batches or "
            "collate of the dataset, and let predict read the tokens",
        ),
    ],
)
def test_a_model_that_cannot_be_exported_is_located(here: Path, mlx: Mlx, kind: str, code: int, lines: str) -> None:
    done = export_kind(mlx, here, kind)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(f"error: {lines}\n")
    assert [file.name for file in here.iterdir() if "run_002" in file.name] == []


def test_a_program_with_other_outputs_is_not_published(here: Path, mlx: Mlx) -> None:
    done = export_kind(mlx, here, "dishonest", "-o", "export")
    assert done.returncode == 1
    assert "\nerror: the exported program (pt2) differs from predict with " in done.stderr
    assert done.stderr.endswith(", with a tolerance of 0.0001\n")
    assert not (here / "export").exists()


def test_a_check_that_takes_too_long_is_stopped(here: Path, mlx: Mlx) -> None:
    done = mlx(here, "xp", "export", "exports", "-o", "late", "--timeout", "0.1")
    line = "the check of the export, importing torch, took more than 0.1 s; allow more with --timeout 0.2"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"error: {line}\n")
    assert not (here / "late").exists()


def test_models_that_need_a_file_are_not_built_from_the_readme(here: Path, mlx: Mlx) -> None:
    (here / "letters.txt").touch()
    done = export_kind(mlx, here, "file", "-o", "weights", "--format", "safetensors")
    problem = "FileNotFoundError: [Errno 2] No such file or directory: 'letters.txt'"
    assert f"; README.md has no code that builds the models: {problem}; without a program" in done.stdout
    assert json.loads((here / "weights/export.json").read_text())["build_problem"] == problem
    assert "import src" not in (here / "weights/README.md").read_text()


@pytest.mark.install
def test_a_project_may_have_a_folder_of_licenses(here: Path, mlx: Mlx) -> None:
    """As https://reuse.software asks for. Only files are copied."""
    (here / "LICENSE").unlink()
    (here / "LICENSES").mkdir()
    (here / "LICENSES" / "MIT.txt").write_text("MIT License\n")
    done = mlx(here, "xp", "export", "exports", "-o", "licensed", "--format", "safetensors")
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "licensed" / "export.json").read_text())["license"] is None


def test_code_with_a_secret_is_not_exported(here: Path, mlx: Mlx) -> None:
    with zipfile.ZipFile(here / "runs/exports/run_001/code.zip", "a") as archive:
        archive.writestr("src/keys.py", 'API_KEY = "sk-ant-abcdef1234567890"\n')
    done = mlx(here, "xp", "export", "exports", "-o", "secret", "--format", "safetensors")
    assert done.returncode == 2
    assert "error: src/keys.py:1 would take a likely secret to the export. Read it from the environment" in done.stderr
    assert not (here / "secret").exists()


def test_missing_tools_are_named_before_anything_is_read(here: Path, mlx: Mlx, python: Mlx) -> None:
    (here / "script.py").write_text(f"import os; os.environ['PATH'] = os.getcwd()\n{MAIN}")
    done = python(here, "script.py", "xp", "export", "exports", "-o", "new", "--format", "aoti")
    line = "error: --format aoti needs a C++ compiler, and there is no g++ or clang++ here; use pt2\n"
    assert (done.returncode, done.stderr) == (2, line)
    done = mlx(here, "xp", "export", "exports", "--format", "pt2,tflite")
    assert done.returncode == 2
    assert "'tflite' is not one of pt2, safetensors, onnx, aoti" in done.stderr


PROOF = {"path": [], "programs": ["pt2"], "tolerance": 1e-4}


def prove(folder: Path, scratch: Path, cases: dict[int, list[dict[str, torch.Tensor]]]) -> dict[str, object]:
    """Run the script of the proof on the export, as the export does."""
    first = next(iter(cases.values()))[1]
    torch.save({"rows": cases, "examples": first}, scratch / "cases.pt")
    result = scratch / "result.json"
    job = PROOF | {"folder": str(folder), "cases": str(scratch / "cases.pt"), "result": str(result)}
    command = [sys.executable, "-I", proof.__file__]
    done = subprocess.run(command, input=json.dumps(job), text=True, capture_output=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    steps = [line.removeprefix(proof.STEP) for line in done.stdout.splitlines() if line.startswith(proof.STEP)]
    return {**json.loads(result.read_text()), "steps": steps}


@pytest.mark.install
def test_the_proof_hides_the_package_and_notices_other_outputs(here: Path, tmp_path: Path) -> None:
    """This Python could import `mlx_runtime`, and `src` lies in the working directory of the process."""
    batch = load_file(here / NAME / "examples.safetensors")
    program = torch.export.load(here / NAME / "program.pt2").module()
    with torch.no_grad():
        outputs = program(batch)
    readme = (here / NAME / "README.md").read_text()
    found = prove(here / NAME, tmp_path, {3: [batch, outputs]})
    assert found["hidden"] is True
    assert found["steps"] == ["loading pt2", "running pt2 with 3 rows", "running the code in README.md"]
    assert found["readme"] is None
    assert found["programs"]["pt2"]["differences"]["3"] < 1e-6  # type: ignore[index]

    (here / NAME / "README.md").write_text(readme.replace("import torch", "import mlx_runtime, torch"))
    found = prove(here / NAME, tmp_path, {3: [batch, outputs]})
    assert str(found["readme"]).startswith("block 1: ModuleNotFoundError: No module named 'mlx_runtime'")

    other = outputs | {"label": outputs["label"] + 1}
    found = prove(here / NAME, tmp_path, {3: [batch, other]})
    assert found["programs"]["pt2"]["problem"] == "differs from predict with 3 rows: label differs in 3 values"  # type: ignore[index]


def test_differences_are_relative_to_the_largest_value_of_an_output() -> None:
    one = torch.tensor([100.0, 1.0])
    assert proof.difference({"y": one}, {"y": one + torch.tensor([0.0, 0.5])}) == (0.005, "y")
    assert proof.difference({"y": one / 100}, {"y": one / 100 + 0.5})[0] == pytest.approx(0.5)
    for wanted, found in ((one, one / 0), (one / 0, -one / 0), (one / 0, one / 0 * 0)):
        with pytest.raises(ValueError, match="NaN or infinity at other positions"):
            proof.difference({"y": wanted}, {"y": found})
    with pytest.raises(ValueError, match=r"y is torch.float64 \(2,\) instead of torch.float32 \(2,\)"):
        proof.difference({"y": one}, {"y": one.double()})
    with pytest.raises(ValueError, match="it returns z instead of y"):
        proof.difference({"y": one}, {"z": one})


@pytest.mark.pure
def test_the_readme_has_the_tolerance_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text('```python\noutputs = {"y": [1.015]}\n```\n')
    monkeypatch.chdir(tmp_path)
    found = [proof.run_readme(tmp_path, {"y": torch.ones(1)}, tolerance) for tolerance in (2e-2, 1e-2)]
    assert found == [None, "block 1 differs from predict by 0.015, with a tolerance of 0.01"]


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
    code = code_of(folder, "## Run the program (pt2)")
    assert 0 < len(code.splitlines()) <= 10
    done = subprocess.run([alone, "-c", code], cwd=folder, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "label (3,) torch.int64\nscores (3, 3) torch.float32\n"
    done = subprocess.run([alone, "-c", "import mlx_runtime"], cwd=folder, capture_output=True, text=True, env={})
    assert done.stderr.endswith("No module named 'mlx_runtime'\n")


@pytest.mark.install
def test_all_formats_are_compared_with_predict(trained: Path, mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(trained, "xp", "export", "exports", "-o", "all", "--format", "pt2,onnx", "--format", "aoti")
    assert done.returncode == 0, done.stderr
    found = json.loads((trained / "all/export.json").read_text())["proof"]["programs"]
    assert {name: item["largest_difference"] < 1e-5 for name, item in found.items()} == dict.fromkeys(found, True)
    assert set(found) == {"pt2", "onnx", "aoti"}
    row = load_export(trained / "all").schema.example_rows()[0]
    label = {int(load_export(trained / "all", name)([row])["label"]) for name in found}
    assert len(label) == 1
    alone, code = environment_with(WITH_ONNX, tmp_path / "alone"), code_of(trained / "all", "## Run the program (onnx)")
    done = subprocess.run([alone, "-c", code], cwd=trained / "all", capture_output=True, text=True, env={})
    assert (done.returncode, done.stdout) == (0, "label (3,) int64\nscores (3, 3) float32\n"), done.stderr
    done = subprocess.run([alone, "-c", "import torch"], capture_output=True, text=True, env={})
    assert done.stderr.endswith("No module named 'torch'\n")


ABOUT = {
    **{"experiment": "texts", "run": "run_001", "checkpoint": {"name": "epoch_0001"}, "metrics": {}},
    **{"code": True, "proof": None, "license": None},
}
"""What README.md says of an export."""


@pytest.mark.install
def test_the_readme_tokenizes_texts_to_the_columns_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    rules = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "text": 2, "[UNK]": 3}, unk_token="[UNK]"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained("tokenizer")
    for length, expected in ((None, [[1, 2], [3, 2]]), (4, [[1, 2, 0, 0], [3, 2, 0, 0]])):
        schema = Schema((Column("input_ids", "int64", (length,)), Column("numbers", "float32")))
        files = {"tokenizer": tokenizer}
        text = instructions.text(ABOUT, schema, programs=(), origin=None, tokenizers=files, models=None)
        names: dict[str, Any] = {}
        exec(text.partition("```\n")[2].partition("```")[0], names)
        assert {name: value.tolist() for name, value in names["batch"].items()} == {"input_ids": expected}


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv"),
        ("torch.nn.modules.sparse.Embedding.from_pretrained", "torch.nn.modules.sparse"),
    ],
)
def test_the_readme_imports_modules_even_for_methods_of_classes(target: str, module: str) -> None:
    models = {"net": {"_target_": target, "size": 2}}
    text = instructions.text(ABOUT, Schema(()), programs=(), origin=None, tokenizers={}, models=models)
    assert f"    'net': {target}(size=2)," in text
    assert f"\nimport {module}\n" in text
