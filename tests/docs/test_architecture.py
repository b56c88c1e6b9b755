"""docs/architecture.md: everything named there exists, and few modules lead from the command to the first step."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "runtime"))
from test_layers import ON_OTHERS, PACKAGE, ROOMS, companion, packages

from mlx_runtime.companions import COMPANIONS

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "architecture.md").read_text()
REFERENCE = re.compile(r"`([\w/<>.]+\.py)(?:: ([\w.]+))?`")
"""A file, such as `driver/driver.py`, or something it defines, such as `driver/driver.py: Driver.run`."""
STEP = re.compile(r"^\d+\. `([\w/<>.]+\.py): ([\w.]+)`((?:, `[\w.]+`)*)", re.MULTILINE)
"""A module on the way from the command to the first step, and its functions that call those of later ones."""

MAX_STEPS = 24
"""A change may lower this figure, not raise it."""


def path_of(file: str) -> Path:
    """Return the path of a file named relative to the package or to the repository."""
    return next((root / file for root in (PACKAGE, ROOT) if (root / file).is_file()), PACKAGE / file)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definition(file: str, name: str) -> ast.AST | None:
    """Return the definition of `function`, `Class` or `Class.method`, or None if the file has no such definition."""
    node: ast.AST | None = tree_of(path_of(file))
    for part in name.split("."):
        node = next((item for item in getattr(node, "body", []) if defines(item, part)), None)
    return node


def defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return getattr(node, "name", None) == name


def steps() -> list[tuple[str, list[str]]]:
    """Return the modules on the way to the first step, and the functions of each."""
    return [(file, [name, *re.findall(r"[\w.]+", more)]) for file, name, more in STEP.findall(PAGE)]


def used_by(node: ast.AST) -> set[str]:
    """Return the names and the texts in a function or a class."""
    parts = ("attr", "id", "value")
    return {text for item in ast.walk(node) for part in parts if isinstance(text := getattr(item, part, None), str)}


@pytest.mark.parametrize(("file", "name"), sorted(set(REFERENCE.findall(PAGE))))
def test_what_it_names_exists(file: str, name: str) -> None:
    assert path_of(file).is_file()
    assert not name or definition(file, name) is not None


def test_few_modules_lead_to_the_first_step_and_each_is_called_by_an_earlier_one() -> None:
    found = steps()
    assert 15 < len(found) == len({file for file, _ in found}) <= MAX_STEPS
    used: set[str] = {found[0][1][0]}
    for file, names in found:
        for name in names:
            node = definition(file, name)
            assert node is not None, (file, name)
            assert {name.split(".")[0], name.split(".")[-1]} & used, f"{file}: {name} is used by none of those above"
            used |= used_by(node)


def test_its_table_of_rooms_is_that_of_the_package() -> None:
    rooms = [name for name in ROOMS if (PACKAGE / name).is_dir()]
    sentences = [ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) for name in rooms]
    rows = [f"| `{name}/` | {(text or '').splitlines()[0]} |" for name, text in zip(rooms, sentences, strict=True)]
    assert re.findall(r"^\| `\w+/` \|.*$", PAGE, re.MULTILINE) == rows


def test_it_names_the_packages_within_rooms() -> None:
    inner = {name.replace(".", "/") for name in packages() if name.count(".") == 1 and not companion(name)}
    assert {*re.findall(r"`(?!companions|runtime)(\w+/\w+)/`", PAGE)} == inner


def test_it_lists_the_companions_and_which_of_them_use_others() -> None:
    rows = []
    for name in COMPANIONS:
        text = ast.get_docstring(ast.parse((PACKAGE / "companions" / name / "__init__.py").read_text()))
        others = ", ".join(f"`{used}`" for user, used in sorted(ON_OTHERS) if user == name)
        rows.append(f"| `companions/{name}/` | {text} | {others} |".replace("|  |", "| |"))
    assert re.findall(r"^\| `companions/\w+/` \|.*$", PAGE, re.MULTILINE) == rows


def test_the_decision_names_the_same_rooms() -> None:
    rooms = [name for name in ROOMS if (PACKAGE / name).is_dir()]
    assert " > ".join(rooms) in (ROOT / "docs" / "decisions" / "0005-rooms.md").read_text()
