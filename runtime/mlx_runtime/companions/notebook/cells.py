"""The `%%mlx` cells of a notebook: a module in `src`, which workers import, and which is stored with runs."""

import ast
import importlib
import keyword
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.importing import add_to_path
from mlx_runtime.storage.documents import is_name
from mlx_runtime.storage.local import write_atomic

DEFAULT = "notebook"
"""Default name of the module in `src`."""

PACKAGE = "import mlx_runtime\n\nmlx_runtime.defer_loading(__name__)  # importing this package loads no data\n"
HEADER = '"""The %%mlx cells of a notebook. Edit them there: running one overwrites this file."""\n'


def register(shell: Any) -> None:
    """Register `%%mlx` in a shell of IPython."""
    modules: dict[Path, CellModule] = {}

    def mlx(line: str, text: str) -> None:
        """Write a cell to the module `src.notebook`, or `src.NAME` after `%%mlx NAME`, and define its names here."""
        name = line.strip() or DEFAULT
        if not name.isidentifier() or keyword.iskeyword(name) or not is_name(f"{name}.py"):
            raise UsageError(f"%%mlx {name:.100}: write %%mlx, or %%mlx NAME for a module src/NAME.py")
        module = CellModule(name, Path.cwd())
        module = modules.setdefault(module.path, module)
        add_to_path(Path.cwd())
        try:
            loaded = module.run(text)
        except NameError as error:
            if error.name in shell.user_ns:
                raise UsageError(
                    f"{error.name} is defined in a cell without %%mlx, so workers would not find it; "
                    "add %%mlx to that cell and run it first"
                ) from None
            raise
        shell.push({name: value for name, value in vars(loaded).items() if not name.startswith("_")})

    shell.register_magic_function(mlx, "cell", "mlx")


@dataclass(frozen=True)
class Block:
    """A statement of a cell, with the comments above it, and others on the same line."""

    text: str
    is_import: bool
    names: frozenset[str]  # that it defines; none of an import
    uses: frozenset[str]  # names in it
    needs: frozenset[str]  # those that it uses when it is executed, and not only in bodies of functions
    always: frozenset[str]  # those of `names` that it defines whatever its conditions are
    binds: frozenset[str]  # `names`, or those of an import


class CellModule:
    """The module `src.NAME` of a project, made of cells.

    As in the namespace of a notebook, the latest definition of a name counts.
    """

    def __init__(self, name: str, project: Path) -> None:
        self.name = f"src.{name}"
        self.path = project / "src" / f"{name}.py"
        self._blocks: list[Block] = []

    def run(self, text: str) -> ModuleType:
        """Add a cell, write the module, and import it again. If that fails, the module stays as it was.

        Raises:
            SyntaxError: the cell is not Python.
            UsageError: the file exists, and was not written from cells.
            StorageError: it cannot be written.
        """
        if self.path.is_file() and not self.path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise UsageError(f"{self.path} exists and does not come from %%mlx cells; name another module: %%mlx NAME")
        blocks = insert_cell(self._blocks, text)
        loaded = sys.modules.pop(self.name, None)
        try:
            self._write(blocks)
            importlib.invalidate_caches()
            module = importlib.import_module(self.name)
        except BaseException:
            if self._blocks:
                self._write(self._blocks)
            else:
                self.path.unlink(missing_ok=True)
            if loaded is not None:
                sys.modules[self.name] = loaded
            raise
        self._blocks = blocks
        return module

    def _write(self, blocks: Sequence[Block]) -> None:
        text = "".join(f"{block.text}\n" if block.is_import else f"\n\n{block.text}\n" for block in blocks)
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir()
                (self.path.parent / "__init__.py").write_text(PACKAGE, encoding="utf-8")
            write_atomic(self.path, HEADER + text)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {short_message(error)}") from error


def insert_cell(blocks: Sequence[Block], text: str) -> list[Block]:
    """Return the blocks of a module with those of a cell, which replace earlier definitions of the same names.

    The cell comes last, so that it can use all others. Blocks that need what it replaces follow it; so do blocks that
    use what it defines, unless it uses them.

    Raises:
        SyntaxError: the cell is not Python.
    """
    new = [*_split(text)]
    texts, present = {block.text for block in new}, {block.text for block in blocks}
    latest = {name: block.text for block in blocks for name in block.binds}
    current = {
        block.text for block in new if block.text in present and all(latest[name] in texts for name in block.binds)
    }
    if texts <= current:
        return [*blocks]
    new = [block for block in new if not (block.is_import and block.text in current)]
    texts, names = {block.text for block in new}, {name for block in new for name in block.names}
    always = {name for block in new for name in block.always}
    used = {name for block in new for name in block.uses}
    for block in reversed(blocks):  # and what these need
        used |= block.needs if block.names & used else set()
    before, after, gone = [], [], set[str]()
    changed = {name for block in new for name in block.binds}
    for block in blocks:
        if block.text in texts or (block.names and block.names <= names and block.always <= always):
            gone |= block.names
        elif block.needs & gone or (block.uses & changed and not block.names & used):
            after.append(block)
            changed |= block.names
            gone |= block.names
        else:
            before.append(block)
    return [*before, *new, *after]


def _split(text: str) -> Iterator[Block]:
    """Yield the statements of a cell."""
    try:
        statements = ast.parse(text, "<%%mlx cell>").body
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, half a surrogate pair, deep nesting
        raise SyntaxError(f"the cell cannot be parsed: {short_message(error)}") from error
    groups: list[list[ast.stmt]] = []
    for node in statements:
        if groups and (node.lineno <= (groups[-1][-1].end_lineno or 0) or _belongs(node, groups[-1])):
            groups[-1].append(node)
        else:
            groups.append([node])
    lines, end = re.split(r"\r\n?|\n", text), 0
    for group in groups:
        begin, end = end, group[-1].end_lineno or 0
        walked = [item for node in group for item in ast.walk(node)]
        is_import = all(isinstance(node, ast.Import | ast.ImportFrom) for node in group)
        binds = frozenset(bound_names(group, set.union))
        names = frozenset() if is_import else binds
        yield Block(
            "\n".join(lines[begin:end]).strip(),
            is_import,
            names,
            uses=frozenset(item.id for item in walked if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)),
            needs=frozenset(name for node in group for name in needed_names(node)),
            always=names & bound_names(group, set.intersection),
            binds=binds,
        )


def _belongs(node: ast.stmt, group: Sequence[ast.stmt]) -> bool:
    """Return True unless both define names: a statement that defines none belongs to a definition next to it."""
    if any(isinstance(item, ast.Import | ast.ImportFrom) for item in (node, *group)):
        return False
    return not (bound_names([node], set.union) and bound_names(group, set.union))


def needed_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses when it is executed."""
    parts = [node]
    while parts:
        part = parts.pop()
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            parts += [part.args, *part.decorator_list, *filter(None, [part.returns])]
        elif isinstance(part, ast.Lambda):
            parts.append(part.args)
        else:
            parts += ast.iter_child_nodes(part)
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id


def bound_names(statements: Sequence[ast.stmt], combine: Callable[..., set[str]]) -> set[str]:
    """Return the names that statements define or import: those of any branch, with `set.union`, or of all branches."""
    found, inside = set[str](), partial(bound_names, combine=combine)
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.If):
            found |= combine(inside(node.body), inside(node.orelse))
        elif isinstance(node, ast.Try):
            handled = [inside(handler.body) for handler in node.handlers]
            found |= combine(inside([*node.body, *node.orelse]), *handled) | inside(node.finalbody)
        elif isinstance(node, ast.With):
            found |= inside(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            found |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return found
