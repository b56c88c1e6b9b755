"""The module of `%%mlx` cells: their order, and the replacement of cells that are run again."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_runtime.companions.notebook.cells import Block, CellModule, insert_cell, register
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure

NET = "class Net(torch.nn.Module):\n    pass"
DATA = "# rows\n@decorated\nclass Data:\n    rows = 3"
USE = "class Models:\n    net: Net = Net()"


def module(*cells: str) -> list[str]:
    """Run cells one after another, and return the statements that the module then has."""
    blocks: list[Block] = []
    for cell in cells:
        blocks = insert_cell(blocks, cell)
    return [block.text for block in blocks]


def test_definitions_come_before_the_cells_that_use_them() -> None:
    assert module(f"import torch\n\n{NET}", f"{DATA}\n\nSIZE = 4\n", USE) == [
        "import torch",
        NET,
        DATA,
        "SIZE = 4",
        USE,
    ]
    wider, other = f"{NET}  # wider", USE.replace("Net()", "Other()")
    assert module(NET, USE, DATA, f"{wider}\nWIDTH = 8") == [DATA, wider, "WIDTH = 8", USE]
    assert module(USE, "class Other: ...", other) == ["class Other: ...", other], "it is defined in a later cell"
    experiment = "class Experiment(Base):\n    models: Models"
    assert module(NET, USE, experiment, wider) == [wider, USE, experiment], "what uses Models follows, too"
    base, leaf = "class Node:\n    def leaf(self):\n        return Leaf()", "class Leaf(Node): ..."
    assert module(base, leaf, f"{base}  # again") == [f"{base}  # again", leaf], "a body is executed later"


def test_the_latest_definition_of_a_name_counts() -> None:
    both = "X = 1\nY = 2"
    assert module(both, "X = 3") == ["Y = 2", "X = 3"]
    assert module("a, b = 1, 2", "a = 3") == ["a, b = 1, 2", "a = 3"]
    assert module(NET, "Net.forward = forward", NET) == [NET, "Net.forward = forward"], "this does not define Net"
    assert module("x = 1; y = [\n2]; z = 3", "x = 4") == ["x = 1; y = [\n2]; z = 3", "x = 4"]


@pytest.mark.parametrize(
    ("name", "value", "cells"),
    [
        (
            "rate",
            0.1,
            ["class Net:\n    rate = 0.1\n\nNet.rate = 0.5", "class Net:\n    rate = 0.1", "rate = Net.rate"],
        ),
        ("device", "cpu", ["device = 'cpu'", "if False:\n    device = 'cuda'"]),
        ("more", [4, 2], ["rows = [1]", "rows += [2]", "more = rows", "rows = [4]"]),
        ("steps", [1, 1], ["steps = []", "steps.append(1)\na = 1", "steps.append(1)\nb = 1"]),
    ],
)
def test_statements_without_names_are_edited_with_their_cell(name: str, value: object, cells: list[str]) -> None:
    """The module is then what a kernel would have if the cells had been run in its order, each once."""
    names: dict[str, object] = {"__file__": __file__}
    exec("\n\n".join(module(*cells)), names)
    assert names[name] == value


@pytest.mark.parametrize("name", ["x" * 300, "..", "a\0"])
def test_names_of_modules_are_checked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    magics: dict[str, Callable[[str, str], None]] = {}
    register(SimpleNamespace(register_magic_function=lambda function, kind, name: magics.update({name: function})))
    with pytest.raises(UsageError, match="write %%mlx, or %%mlx NAME") as caught:
        magics["mlx"](name, "X = 1")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_first_cell_that_fails_leaves_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "src", raising=False)
    with pytest.raises(ZeroDivisionError):
        CellModule("broken", tmp_path).run("1 / 0")
    assert [file.name for file in (tmp_path / "src").glob("*.py")] == ["__init__.py"]
