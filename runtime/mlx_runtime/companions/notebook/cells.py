"""The module of the `%%mlx` cells of a notebook, written to a file for workers and later readers."""

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.storage.local import write_atomic

PACKAGE = "import mlx_runtime\n\nmlx_runtime.defer_loading(__name__)  # importing this package loads no data\n"
HEADER = '"""The %%mlx cells of a notebook. Edit them there: running one overwrites this file."""\n'


@dataclass
class Cell:
    """An executed cell; `id` is None if the notebook does not send one."""

    text: str
    id: str | None = None


class CellModule:
    """The module `src.NAME` of a project: its cells in the order in which they were first run.

    As in the namespace of a notebook, the latest definition counts: a cell replaces its own earlier text, and
    definitions of the same names in other cells.
    """

    def __init__(self, name: str, project: Path) -> None:
        self.name = f"src.{name}"
        self.path = project / "src" / f"{name}.py"
        self._cells: list[Cell] = []

    @property
    def text(self) -> str:
        return "\n\n".join([HEADER, *(f"# %%\n{cell.text.strip()}\n" for cell in self._cells)])

    def run(self, cell: Cell) -> ModuleType:
        """Add a cell, write the module, and import it again. If that fails, the module stays as it was.

        Raises:
            SyntaxError: the cell is not Python.
            UsageError: the file exists, and was not written from cells.
            StorageError: it cannot be written.
        """
        before, loaded = self._cells, sys.modules.pop(self.name, None)
        try:
            self._cells = insert_cell(before, cell)
            self._write()
            importlib.invalidate_caches()
            return importlib.import_module(self.name)
        except BaseException:
            self._cells = before
            if before:
                self._write()
            elif self.path.is_file() and self._ours():
                self.path.unlink()
            if loaded is not None:
                sys.modules[self.name] = loaded
            raise

    def _write(self) -> None:
        if self.path.is_file() and not self._ours():
            raise UsageError(f"{self.path} exists and does not come from %%mlx cells; name another module: %%mlx NAME")
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir()
                (self.path.parent / "__init__.py").write_text(PACKAGE, encoding="utf-8")
            write_atomic(self.path, self.text)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {short_message(error)}") from error

    def _ours(self) -> bool:
        return self.path.read_text(encoding="utf-8", errors="replace").startswith(HEADER)


def insert_cell(cells: list[Cell], new: Cell) -> list[Cell]:
    """Return the cells with a new one in place of the one that it replaces, or at the end.

    Raises:
        SyntaxError: the new cell is not Python.
    """
    try:
        statements = ast.parse(new.text, "<%%mlx cell>").body
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, half a surrogate pair, deep nesting
        raise SyntaxError(f"the cell cannot be parsed: {short_message(error)}") from error
    result: list[Cell] = []
    positions: dict[bool, int] = {}  # of the first cell with the same id, and of the first that has changed
    for cell in cells:
        same = new.id is not None and cell.id == new.id
        head, tail = ("", "") if same or cell.text == new.text else _cut(cell.text, statements)
        if head.strip():
            result.append(Cell(head, cell.id))
        if head != cell.text:
            positions.setdefault(same, len(result))
        if tail.strip():
            result.append(Cell(tail, cell.id))
    result.insert(positions.get(True, positions.get(False, len(result))), new)
    return result


def _cut(text: str, new: Sequence[ast.stmt]) -> tuple[str, str]:
    """Return the text of a cell before and after its first definition of a name that new statements define.

    Neither part defines any of them. Both are empty if nothing but imports of the new statements would be left.
    """
    names, known = {name for node in new for name in defined_names(node)}, {ast.dump(node) for node in new}
    statements = ast.parse(text).body
    gone = [node for node in statements if (found := set(defined_names(node))) and found <= names]
    if not gone:
        return text, ""
    imports = (ast.Import, ast.ImportFrom)
    if all(node in gone or (isinstance(node, imports) and ast.dump(node) in known) for node in statements):
        return "", ""
    removed = {line for node in gone for line in range(first_line(node), (node.end_lineno or 0) + 1)}
    lines = [line for number, line in enumerate(text.splitlines(keepends=True), start=1) if number not in removed]
    before = min(removed) - 1
    return "".join(lines[:before]), "".join(lines[before:])


def defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines: a class, a function or variables."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (item.id for item in ast.walk(target) if isinstance(item, ast.Name))


def first_line(node: ast.stmt) -> int:
    """Return the number of the first line of a statement, including its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])
