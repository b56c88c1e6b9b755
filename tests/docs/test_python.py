"""The guide to Python: its blocks run, as the cells of a notebook."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.install  # with the commands of README.md


def test_its_blocks_run(bound: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    folder = Path(shutil.copytree(bound, tmp_path / "digits"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "python.md").read_text(), re.DOTALL)
    cells = ["%load_ext mlx_runtime", *blocks, 'print(run(Experiment, ["--fast-dev-run"]).result().status)']
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute(env=environment)
    assert notebook.cells[-1].outputs[-1].text == "SUCCEEDED\n"
    assert len(blocks) == 3
