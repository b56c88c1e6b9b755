"""`${...}` in conf.yaml: resolved, except for environment variables that are not set here, and escaped in text."""

import contextlib
import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from mlx_runtime.errors import short_message
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
    config = from_yaml(text.encode() if isinstance(text, str) else text)
    try:
        tree: dict[str, Any] = resolve_config(config, environment=environment)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(short_message(error)) from error
    return tree


def resolve_config(config: Any, *, environment: bool) -> Any:
    """Convert a config of OmegaConf to plain dicts and lists, with interpolations resolved.

    Interpolations that need an unset variable, directly or indirectly, become References; without `environment`, so do
    all that read the environment.
    """
    unread = False  # True if the current interpolation needs a variable that is unset or must not be read

    def variable(*arguments: Any) -> Any:
        nonlocal unread
        with contextlib.suppress(KeyError):
            if environment:
                return oc.env(*arguments)
        unread = True
        raise LookupError

    def container(node: Any, raw: Any) -> Any:
        if isinstance(raw, dict):
            return {key: child(node, key, value) for key, value in raw.items()}
        return [child(node, index, value) for index, value in enumerate(raw)]

    def child(node: Any, key: Any, raw: Any) -> Any:
        nonlocal unread
        if not OmegaConf.is_interpolation(node, key):
            return container(node[key], raw) if isinstance(raw, dict | list) else raw
        unread = False
        try:
            value = node[key]
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException:
            if unread:
                return Reference(raw)
            raise

    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    try:
        return container(config, OmegaConf.to_container(config))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def unset_variables(node: Any) -> set[str]:
    """Return the environment variables in a config from `parse_config` that are not set here."""
    if isinstance(node, dict | list):
        return {name for item in (node.values() if isinstance(node, dict) else node) for name in unset_variables(item)}
    return set(re.findall(r"\$\{oc\.env:\s*(\w+)", node)) if isinstance(node, Reference) else set()
