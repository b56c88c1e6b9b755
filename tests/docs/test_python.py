"""The code blocks of the guides to Python and functions run as cells of a notebook."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.install  # with the commands of README.md


def blocks_of(guide: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / guide).read_text(), re.DOTALL)


def printed_by(cells: list[str], folder: Path, environment: dict[str, str]) -> list[str]:
    """Return what each cell prints."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute(env=environment)
    return ["".join(item.text for item in cell.outputs if item.get("name") == "stdout") for cell in notebook.cells]


def test_the_blocks_run(bound: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    folder = Path(shutil.copytree(bound, tmp_path / "digits"))
    module, *blocks = blocks_of("functions.md")
    (folder / "src" / "training.py").write_text(module)
    last = 'print(run(Experiment, ["--fast-dev-run"]).result().status)'
    start = "%load_ext mlx_runtime\nfrom mlx_runtime import Trainer"  # imports Ray, which changes the environment
    cells = [start, *blocks_of("python.md"), last, *blocks]
    _, _, _, _, tried, first, datasets, running, _, tuned = printed_by(cells, folder, environment)
    assert tried == "SUCCEEDED\n"
    assert first.startswith("Trainer with 2 workers, engine local, backend torch\n")
    assert first.endswith("<Run train_func/run_001, SUCCEEDED> 2\n")
    assert datasets == "Linear(in_features=1, out_features=1, bias=True)\n2\n"
    assert len(running.splitlines()) == 3 + 1 + 1
    assert tuned.endswith("'num_epochs': 2} SUCCEEDED\n")
