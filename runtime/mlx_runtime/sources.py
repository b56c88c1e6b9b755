"""The code that decides what a class does, so that a change of it can be noticed."""

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def code_of(cls: type, project: Path) -> list[str]:
    """The definitions that a class is made of, without comments and formatting: its own, and all that it refers to.

    Args:
        cls: of an imported module.
        project: folder whose modules are followed; libraries are not.
    """
    found: dict[tuple[str, str], str] = {}
    todo = [(cls.__module__, cls.__name__)]
    while todo:
        module, name = todo.pop()
        if (module, name) in found:
            continue
        definitions = _definitions(module, project)
        nodes = definitions.get(name, []) if name else [node for nodes in definitions.values() for node in nodes]
        found[module, name] = "\n".join(ast.dump(node) for node in nodes)
        for node in nodes:
            todo += _references(node, module)
    return [f"{module}.{name}: {text}" for (module, name), text in sorted(found.items()) if text]


def _definitions(module: str, project: Path) -> dict[str, list[ast.stmt]]:
    """The statements of a module that give a meaning to each of its names; none for a module of a library."""
    file = Path("/")
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(module)  # loaded or not: a function may import it when it is called
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
    """What a statement refers to: (module, name), an empty name for all of a module."""
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
    """The package that relative imports of a module start from."""
    found = importlib.util.find_spec(module)
    return module if found and found.submodule_search_locations is not None else module.rpartition(".")[0]
