"""Writes the stubs of doors, in which mypy and editors find the names that a package exports."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).with_name("mlx_runtime")


def exports(door: Path) -> tuple[list[str], dict[str, str]] | None:
    """Return the modules that a door exports, and the module of each name; None if `__init__.py` has no door."""
    for call in ast.walk(ast.parse(door.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "door":
            modules = [name for item in call.args[1:] for name in ast.literal_eval(item).split()]
            names = {str(item.arg): ast.literal_eval(item.value).split() for item in call.keywords}
            return modules, {name: module for module, listed in names.items() for name in listed}
    return None


def stub(door: Path) -> str | None:
    """Return the text of the stub of a door."""
    found = exports(door)
    if found is None:
        return None
    package = ".".join(door.relative_to(PACKAGE.parent).parent.parts)
    lines = [f"from {package}.{module} import {name} as {name}" for name, module in found[1].items()]
    tables = [
        f"{target.id}: dict[str, str]"
        for node in ast.parse(door.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return "\n".join(["# Written by runtime/stubs.py.", *lines, *tables, ""])


def stubs() -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each stub."""
    for door in sorted(PACKAGE.rglob("__init__.py")):
        if (text := stub(door)) is not None:
            yield door.with_suffix(".pyi"), text


if __name__ == "__main__":
    for file, text in stubs():
        file.write_text(text)
