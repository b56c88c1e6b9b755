"""The code that decides what a class does, so that changes can be detected."""

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def code_of(cls: type, project: Path) -> list[str]:
    """Return the definition of a class and all definitions it refers to, without comments and formatting.

    Args:
        cls: Class of an imported module.
        project: Folder whose modules are followed; libraries are not.
    """
    code: dict[tuple[str, str], str] = {}
    todo = [(cls.__module__, cls.__name__)]
    while todo:
        module, name = todo.pop()
        if (module, name) in code:
            continue
        definitions = _definitions(module, project)
        nodes = definitions.get(name, []) if name else [node for nodes in definitions.values() for node in nodes]
        code[module, name] = "\n".join(ast.dump(node) for node in nodes)
        for node in nodes:
            todo += _references(node, module)
    return [f"{module}.{name}: {text}" for (module, name), text in sorted(code.items()) if text]


def _definitions(module: str, project: Path) -> dict[str, list[ast.stmt]]:
    """Return the statements that define each name of a module; nothing for a module of a library."""
    file = Path("/")
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(module)  # even if nothing has imported it yet
        file = Path((found.origin if found else None) or "/")
    in_project = file.suffix == ".py" and file.is_relative_to(project) and "site-packages" not in file.parts
    if not in_project:
        return {}
    definitions: dict[str, list[ast.stmt]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                definitions.setdefault((alias.asname or alias.name).partition(".")[0], []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for item in ast.walk(target):
                    if isinstance(item, ast.Name):
                        definitions.setdefault(item.id, []).append(node)
    return definitions


def _references(node: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """Yield what a statement refers to as (module, name), with an empty name for all of a module."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            yield module, item.id
        elif isinstance(item, ast.Import):
            yield from ((alias.name, "") for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            source = "." * item.level + (item.module or "")
            if item.level:
                source = importlib.util.resolve_name(source, _package(module))
            for alias in item.names:
                yield source, "" if alias.name == "*" else alias.name
                yield f"{source}.{alias.name}", ""  # it may be a module


def _package(module: str) -> str:
    """Return the package that relative imports of a module start from."""
    found = importlib.util.find_spec(module)
    return module if found and found.submodule_search_locations is not None else module.rpartition(".")[0]
