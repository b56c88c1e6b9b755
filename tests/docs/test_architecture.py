"""docs/architecture.md: everything named there exists, and each function uses those listed below it."""

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
STEP = re.compile(r"^( *)(?:\d+\.|-) `([\w/<>.]+\.py): ([\w.]+)`", re.MULTILINE)
"""An item of a list that starts with a function; its callees are indented below it."""


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


def calls() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return each function of the nested lists together with the one that it is listed below."""
    pairs, above = [], []
    for indent, file, name in STEP.findall(PAGE):
        above = [item for item in above if item[0] < len(indent)]
        if above:
            pairs.append((above[-1][1:], (file, name)))
        above.append((len(indent), file, name))
    return pairs


@pytest.mark.parametrize(("file", "name"), sorted(set(REFERENCE.findall(PAGE))))
def test_what_it_names_exists(file: str, name: str) -> None:
    assert path_of(file).is_file()
    assert not name or definition(file, name) is not None


@pytest.mark.parametrize(("caller", "callee"), calls())
def test_each_function_uses_those_listed_below_it(caller: tuple[str, str], callee: tuple[str, str]) -> None:
    node = definition(*caller)
    assert node is not None
    used = {getattr(item, "attr", getattr(item, "id", None)) for item in ast.walk(node)}
    assert {callee[1].split(".")[0], callee[1].split(".")[-1]} & used


def test_its_table_of_rooms_is_that_of_the_package() -> None:
    rooms = [name for name in ROOMS if (PACKAGE / name).is_dir()]
    sentences = [ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) for name in rooms]
    rows = [f"| `{name}/` | {(text or '').splitlines()[0]} |" for name, text in zip(rooms, sentences, strict=True)]
    assert re.findall(r"^\| `\w+/` \|.*$", PAGE, re.MULTILINE) == rows


def test_its_table_of_packages_within_rooms_is_complete() -> None:
    inner = [name.replace(".", "/") for name in packages() if name.count(".") == 1 and not companion(name)]
    sentences = {name: ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) for name in inner}
    rows = {f"| `{name}/` | {(text or '').splitlines()[0]} |" for name, text in sentences.items()}
    assert {*re.findall(r"^\| `(?!companions)\w+/\w+/` \|.*$", PAGE, re.MULTILINE)} == rows


def test_it_lists_the_companions_and_says_why_some_use_others() -> None:
    folders = [f"companions/{name}" for name in COMPANIONS]
    sentences = [ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())) for name in folders]
    rows = [f"| `{name}/` | {text} |" for name, text in zip(folders, sentences, strict=True)]
    assert re.findall(r"^\| `companions/\w+/` \|.*$", PAGE, re.MULTILINE) == rows
    said = [
        set(re.findall(r"`(\w+)`", line.partition(":")[0])) for line in re.findall(r"^- `\w+` .*$", PAGE, re.MULTILINE)
    ]
    assert [pair for pair in ON_OTHERS if not any(set(pair) <= names for names in said)] == []


def test_the_decision_names_the_same_rooms() -> None:
    rooms = [name for name in ROOMS if (PACKAGE / name).is_dir()]
    assert " > ".join(rooms) in (ROOT / "docs" / "decisions" / "0005-rooms.md").read_text()
