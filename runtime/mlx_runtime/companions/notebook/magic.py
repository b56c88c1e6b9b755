"""The extension of IPython: `%load_ext mlx_runtime` registers `%%mlx`."""

import importlib.machinery
import keyword
import sys
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook.cells import Cell, CellModule
from mlx_runtime.errors import UsageError
from mlx_runtime.storage.documents import is_name

DEFAULT = "notebook"
"""Default name of the module of cells in `src`."""


def register(shell: Any) -> None:
    """Register `%%mlx` in a shell of IPython."""
    modules: dict[Path, CellModule] = {}

    def mlx(line: str, text: str) -> None:
        """Write a cell to the module `src.notebook`, or `src.NAME` after `%%mlx NAME`, and define its names here."""
        name = line.strip() or DEFAULT
        if not name.isidentifier() or keyword.iskeyword(name) or not is_name(f"{name}.py"):
            raise UsageError(f"%%mlx {name:.100}: write %%mlx, or %%mlx NAME for a module src/NAME.py")
        if name != DEFAULT and _is_taken(name):
            raise UsageError(f"%%mlx {name}: src/{name}.py would hide the module {name}; choose another name")
        module = CellModule(name, Path.cwd())
        module = modules.setdefault(module.path, module)
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            loaded = module.run(Cell(text, _cell_id(shell)))
        except NameError as error:
            if error.name in shell.user_ns:
                raise UsageError(
                    f"{error.name} is defined in a cell without %%mlx, so workers would not find it; "
                    "add %%mlx to that cell and run it first"
                ) from None
            raise
        shell.push({name: value for name, value in vars(loaded).items() if not name.startswith("_")})

    shell.register_magic_function(mlx, "cell", "mlx")


def _is_taken(name: str) -> bool:
    """Return True for the name of an installed module, or of a module of Python's library."""
    if name in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(name, [path for path in sys.path if _is_installed(path)])
    return found is not None


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


def _cell_id(shell: Any) -> str | None:
    """Return the id of the cell that is running, if the notebook sends it."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell_id = parent.get("metadata", {}).get("cellId")
    return str(cell_id) if cell_id else None
