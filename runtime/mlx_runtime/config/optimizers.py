"""Optimizers over the parameters of the models that `map_params_to_optimizers` assigns to them."""

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_runtime.config.building import Tree, build
from mlx_runtime.config.targets import object_at
from mlx_runtime.errors import ConfigError, suggest


def build_optimizers(node: Tree, models: Any) -> Any:
    """Build the group of optimizers.

    Args:
        node: config node of the group.
        models: the group of models, with `map_params_to_optimizers`.

    Raises:
        ConfigError: the map names a model or an optimizer that does not exist, or leaves an optimizer without a model.
    """
    modules = {name: module for name, module in vars(models).items() if hasattr(module, "parameters")}
    names = [name for name in node if name != "_target_"]
    mapping = getattr(models, "map_params_to_optimizers", {})
    if problems := mapping_problems(mapping, list(modules), names, type(models)):
        raise ConfigError("\n  ".join(problems))
    params: dict[str, list[Any]] = {name: [] for name in names}
    for model, optimizer in mapping.items():
        params[optimizer] += modules[model].parameters()
    optimizers = {}
    for name in names:
        arguments = {key: value for key, value in node[name].items() if key != "params"}
        optimizers[name] = build(arguments, f"optimizers.{name}", params=params[name])
    return object_at(node["_target_"])(**optimizers)


def literal_mapping_problems(tree: Tree, groups: Mapping[str, type]) -> list[str]:
    """Return the problems of a map that the source of `Models` spells out; others are checked when they are used."""
    mapping = _literal_mapping(groups["models"]) if "models" in groups and "optimizers" in groups else None
    if mapping is None:
        return []
    models, optimizers = ([name for name in tree[group] if name != "_target_"] for group in ("models", "optimizers"))
    return mapping_problems(mapping, models, optimizers, groups["models"])


def mapping_problems(
    mapping: Mapping[str, str], models: Sequence[str], optimizers: Sequence[str], cls: type
) -> list[str]:
    """Return the problems of the `map_params_to_optimizers` of `cls`, one line each."""
    owner = f"{cls.__name__}.map_params_to_optimizers"
    problems = []
    for model, optimizer in mapping.items():
        for kind, name, known in (("model", model, models), ("optimizer", optimizer, optimizers)):
            if name not in known:
                problems.append(f"{owner} names the {kind} {name!r}, which does not exist.{suggest(name, known)}")
    if problems:
        return problems
    idle = sorted(set(optimizers) - set(mapping.values()))
    return [f"optimizers.{name} trains no model; give it one in {owner}, or remove it" for name in idle]


def _literal_mapping(cls: type) -> dict[str, str] | None:
    """Return the attribute of the class, or the literal in `self.map_params_to_optimizers = {...}` in its source."""
    mapping = getattr(cls, "map_params_to_optimizers", None)
    if isinstance(mapping, dict):
        return mapping
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(item, ast.Attribute) and item.attr == "map_params_to_optimizers" for item in targets):
                return ast.literal_eval(node.value)  # type: ignore[attr-defined,no-any-return]
    return None
