"""The module of `%%mlx` cells: their order, and the replacement of cells that are run again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_runtime.companions.notebook.cells import Cell, insert_cell
from mlx_runtime.companions.notebook.magic import register
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure

NET = "import torch\n\n\nclass Net(torch.nn.Module):\n    pass\n"
DATA = "@decorated\nclass Data:\n    rows = 3\n\n\nSIZE = 4\n"
USE = "class Models:\n    net: Net = Net()\n"


def texts(*cells: Cell) -> list[str]:
    """Run cells one after another, and return the texts that the module then has."""
    found: list[Cell] = []
    for cell in cells:
        found = insert_cell(found, cell)
    return [cell.text for cell in found]


def test_cells_stay_in_the_order_in_which_they_were_first_run() -> None:
    assert texts(Cell(NET), Cell(DATA), Cell(USE)) == [NET, DATA, USE]
    assert texts(Cell(NET), Cell(DATA), Cell(NET)) == [NET, DATA]


@pytest.mark.parametrize("ids", [(None, None), ("a", "a")])
def test_a_cell_that_is_run_again_replaces_its_earlier_text(ids: tuple[str | None, str | None]) -> None:
    wider = NET + "WIDTH = 8\n"
    assert texts(Cell(NET, ids[0]), Cell(USE, "b"), Cell(wider, ids[1])) == [wider, USE]


def test_a_cell_whose_names_have_changed_is_known_by_its_id() -> None:
    assert texts(Cell(NET, "a"), Cell(USE, "b"), Cell("X = 1", "a")) == ["X = 1", USE]
    assert texts(Cell(NET), Cell(USE), Cell("X = 1")) == [NET, USE, "X = 1"]


def test_the_last_definition_of_a_name_counts() -> None:
    other = "class Data:\n    rows = 5\n"
    assert texts(Cell(DATA, "a"), Cell(USE, "b"), Cell(other, "c")) == [other, "\n\nSIZE = 4\n", USE]
    both = f"X = 1\n{DATA}"
    assert texts(Cell(both), Cell(other), Cell("SIZE = 5\n")) == ["X = 1\n", other, "SIZE = 5\n"]


def test_imports_that_other_definitions_need_stay() -> None:
    new = "class Net(torch.nn.Module):\n    wide = True\n"
    first, *rest = texts(Cell(NET), Cell(new))
    assert (first.strip(), rest) == ("import torch", [new])
    assert texts(Cell(NET), Cell(f"{NET}\n"), Cell(f"{NET}\n\n")) == [f"{NET}\n\n"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, "write %%mlx, or %%mlx NAME") for name in ("x" * 300, "é" * 120, "a/b", "..", "/x", "a\0", "-x")),
        *((name, "would hide the module") for name in ("torch", "json", "pytest", "mlx_runtime")),
    ],
)
def test_names_of_modules_are_checked(name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    magics: dict[str, Callable[[str, str], None]] = {}
    register(SimpleNamespace(register_magic_function=lambda function, kind, name: magics.update({name: function})))
    with pytest.raises(UsageError, match=problem) as caught:
        magics["mlx"](name, "X = 1")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_is_not_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        insert_cell([Cell(NET)], Cell("class Net(:"))


@pytest.mark.process
def test_the_package_that_the_first_cell_creates_loads_no_data(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from mlx_runtime.companions.notebook.cells import Cell, CellModule\n"
        "rows = 'class Rows:\\n    def to_hf(self): ...\\n    def __init__(self): 1 / 0\\n'\n"
        "print(CellModule('cells', Path.cwd()).run(Cell(rows + 'def f(rows=Rows()): ...')).f.__defaults__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(Rows(),)\n", done.stderr
