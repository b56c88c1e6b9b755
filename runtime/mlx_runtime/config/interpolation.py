"""The values of a config by key, with `${...}` resolved unless it needs a variable that is not set here."""

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from mlx_runtime.storage.documents import from_yaml


class Reference(str):
    """A text of conf.yaml with an unresolved `${...}`. In all other values of a config, `${` stands for itself."""


def escape(value: Any) -> Any:
    """Return a value as written in conf.yaml: `${` in text becomes `\\${`, and each backslash before it is doubled."""
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, Reference):
        return str(value)
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def parse_config(text: str | bytes, *, environment: bool = True) -> dict[str, Any]:
    """Parse YAML as a run does. `???` is kept; without `environment`, so is `${oc.env:NAME}`, as a Reference.

    Raise ValueError, with a message of one line, if it is not YAML, too large, too deep, or not a mapping.
    """
    tree: dict[str, Any] = plain_tree(from_yaml(text.encode() if isinstance(text, str) else text), environment)
    return tree


def plain_tree(config: Any, environment: bool = True) -> Any:
    """Convert a config of OmegaConf to plain dicts and lists, with interpolations resolved.

    Those that cannot be resolved here become References: those of unset variables or, without `environment`, of all.
    """
    OmegaConf.register_new_resolver("oc.env", oc.env if environment else _hidden, replace=True)
    try:
        return _plain(config, OmegaConf.to_container(config))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _hidden(*_: Any) -> Any:
    raise LookupError


def _plain(node: Any, raw: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _plain_item(node, key, value) for key, value in raw.items()}
    return [_plain_item(node, index, value) for index, value in enumerate(raw)]


def _plain_item(node: Any, key: Any, raw: Any) -> Any:
    if not OmegaConf.is_interpolation(node, key):
        return _plain(node[key], raw) if isinstance(raw, dict | list) else raw
    try:
        value = node[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError):
        return Reference(raw)


def values_by_key(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values below a mapping by full key, each mapping before its values."""
    values: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        values |= {f"{prefix}{name}": value, **values_by_key(value, f"{prefix}{name}.")}
    return values


def unset_variables(node: Any) -> set[str]:
    """Return the environment variables in a config from `parse_config` that are not set here."""
    if isinstance(node, dict | list):
        return {name for item in (node.values() if isinstance(node, dict) else node) for name in unset_variables(item)}
    return set(re.findall(r"\$\{oc\.env:\s*(\w+)", node)) if isinstance(node, Reference) else set()
