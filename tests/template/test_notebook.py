"""The notebook of the template, executed cell by cell as by Jupyter, and errors in notebooks."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from mlx_runtime import open_run

pytestmark = pytest.mark.examples

FAILS = {"tags": ["raises-exception"]}

MORE = (
    ("class Mine(Experiment):\n    pass\n\nrun(Mine)", FAILS),
    ("%%mlx\nclass Other(Mine):\n    pass", FAILS),
    ("%%mlx\nclass Broken:\n    value = 1 / 0", FAILS),
    ("%%mlx\nfrom mlx_runtime import run\n\nclass Starting:\n    pass\n\nrun(Starting)", FAILS),
    ("%%mlx models\nX = 1", FAILS),
    ("%%mlx\nclass Models:\n    pass\n", {}),
    (
        "%%mlx\nfrom dataclasses import dataclass\n\n@dataclass\nclass Models:\n    net: nn.Module = WideNet(8)\n"
        '    map_params_to_optimizers = {"net": "adam"}',
        {},
    ),
    ("from src.notebook import Models as Latest\nprint(Latest is Models, Latest().net.layers[0].out_channels)", {}),
    ('run(Experiment, ["cfg.num_epochs=x"])', FAILS),
)
"""Cells that a test adds to the notebook: their text, and their metadata."""


@pytest.fixture(scope="module")
def project(baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:

    return Path(shutil.copytree(baked, tmp_path_factory.mktemp("notebook") / "digits"))


@pytest.fixture(scope="module")
def cells(project: Path, environment: dict[str, str]) -> list[Any]:
    """The cells of the notebook and those of `MORE`, with what they have printed and drawn."""
    notebook = nbformat.read(project / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells += [nbformat.v4.new_code_cell(text, metadata=metadata) for text, metadata in MORE]
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(project)}})
    client.execute(env=environment)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output(cell: Any, kind: str) -> str:
    """Return the texts of the outputs of a kind: what was printed, drawn, returned or raised, without colors."""
    found = [item for item in cell.outputs if item.output_type == kind]
    texts = ["\n".join(item.traceback) if kind == "error" else item.get("text") for item in found]
    return "\n".join(text or str(item.data) for text, item in zip(texts, found, strict=True))


@pytest.fixture(scope="module")
def cell(cells: list[Any]) -> Callable[[str], Any]:
    """`cell("run(")` returns the only cell whose text begins so, or contains it in a line of its own."""

    def find(text: str) -> Any:
        (found,) = [cell for cell in cells if f"\n{text}" in f"\n{cell.source}"]
        return found

    return find


def test_it_trains_and_draws_a_table(cell: Callable[[str], Any], project: Path) -> None:
    running = cell("training = run(Experiment")
    assert "'SUCCEEDED'" in output(running, "execute_result")
    drawn = output(running, "display_data")
    assert "<b>digits run_001</b> SUCCEEDED" in drawn
    assert "samples/s" in drawn
    assert drawn.index("val") < drawn.index("      test")  # other columns have another header
    assert output(running, "stream") == ""
    assert "digits of the validation set are misclassified" in output(cell("net = outcome.run"), "stream")


def test_its_classes_are_stored_with_the_run_and_read_elsewhere(cells: list[Any], project: Path) -> None:
    place = project / "runs" / "digits" / "run_001"
    run = open_run(place)
    assert run.config["models"]["net"] == {"_target_": "src.notebook.WideNet", "width": 128, "dropout": 0.2}
    with zipfile.ZipFile(place / "code.zip") as code:
        assert "class WideNet" in code.read("src/notebook.py").decode()
    script = f"from mlx_runtime import open_run; print(open_run({str(place)!r}).load_models(trust=True).net)"
    done = subprocess.run([sys.executable, "-c", script], cwd=project.parent, capture_output=True, text=True)
    assert done.stdout.startswith("WideNet("), done.stderr


def test_errors_are_one_line_with_the_cure(cell: Callable[[str], Any]) -> None:
    mine = "workers cannot import Mine from cells without %%mlx; add %%mlx to its cell, after %load_ext mlx_runtime"
    assert output(cell("class Mine("), "error") == f"error: {mine}"
    other = "Mine is defined in a cell without %%mlx, so workers would not find it"
    assert output(cell("class Other("), "error") == f"error: {other}; add %%mlx to that cell and run it first"
    assert "src.notebook starts a run while it is imported" in output(cell("%%mlx\nfrom mlx_runtime"), "error")
    assert "does not come from %%mlx cells" in output(cell("%%mlx models"), "error")
    assert "\n" not in output(cell('run(Experiment, ["cfg.num_epochs=x"])'), "error")
    assert "cfg.num_epochs" in output(cell('run(Experiment, ["cfg.num_epochs=x"])'), "error")


def test_cells_that_are_run_again_replace_their_earlier_text(cell: Callable[[str], Any], project: Path) -> None:
    assert output(cell("from src.notebook import Models"), "stream") == "True 8\n"
    text = (project / "src" / "notebook.py").read_text()
    assert text.count("class Models:") == 1
    assert text.index("class WideNet") < text.index("class Models") < text.index("class Experiment")
    assert "Broken" not in text
    assert "Other" not in text
