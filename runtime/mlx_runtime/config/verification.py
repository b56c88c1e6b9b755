"""Verify that conf.yaml re-creates the defaults of the code: build each from the YAML text and compare deeply."""

import warnings
from collections.abc import Mapping
from typing import Any

from mlx_runtime.config.building import declare
from mlx_runtime.config.conversion import fitted
from mlx_runtime.config.equality import unlike
from mlx_runtime.config.expressions import recorded_default
from mlx_runtime.config.interpolation import parsed
from mlx_runtime.config.literals import Node
from mlx_runtime.config.nodes import DUMMY_PARAMS
from mlx_runtime.config.signatures import MISSING, Parameter, groups, is_factory, parameters
from mlx_runtime.errors import BindError, ConfigError, short_message


def verify(experiment: type, tree: Mapping[str, Node], text: str) -> None:
    """Refuse a conf.yaml that would build something other than the code declares.

    Args:
        experiment: its class.
        tree: the nodes that were written.
        text: the YAML of the nodes.

    Raises:
        BindError: some defaults are not re-created; the message has one line for each.
    """
    written = parsed(text)
    problems = []
    for group, cls in groups(experiment).items():
        for parameter in parameters(cls) or []:
            if parameter.default is MISSING or parameter.name not in tree[group]:
                continue
            key = f"{group}.{parameter.name}"
            if difference := _difference(cls, parameter, written[group][parameter.name], key):
                problems.append(f"{key}: conf.yaml would not re-create this default: {difference}")
    if problems:
        raise BindError("\n  ".join(problems))


def _difference(cls: type, parameter: Parameter, node: Any, key: str) -> str | None:
    default = parameter.default
    if is_factory(default):
        recorded = recorded_default(cls, parameter.name)
        assert recorded is not None, "a factory without source is refused before"
        default = recorded[0]
    objects = {}
    if isinstance(node, dict) and node.get("params") == "???":
        node = {name: value for name, value in node.items() if name != "params"}
        objects["params"] = DUMMY_PARAMS
    if _is_open(node):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # issued when the default itself was made
            return unlike(default, lambda: fitted(declare(node, key, **objects), parameter.hint))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"it cannot be built again: {type(error).__name__}: {short_message(error)}"


def _is_open(node: Any) -> bool:
    """Return True if the user must fill in something in a node."""
    if isinstance(node, dict | list):
        return any(map(_is_open, node.values() if isinstance(node, dict) else node))
    return bool(node == "???")
