"""Python values as overrides in Hydra's grammar."""

from typing import Any

from mlx_runtime.config.composition import parse_overrides, quote
from mlx_runtime.errors import ConfigError


def override(key: str, value: Any) -> str:
    """Return the override that sets a key, new or not, to a plain value; tuples become lists.

    Raises:
        ConfigError: the value is not plain, or cannot be expressed in Hydra's grammar.
    """
    plain = _plain(value, key)
    text = f"++{key}={_literal(plain)}"
    read = parse_overrides([text])[0].value()
    if repr(read) != repr(plain):  # 1 equals 1.0 and True
        raise ConfigError(f"{key}={plain!r} cannot be written as an override, which would set {read!r}")
    return text


def _plain(value: Any, key: str) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:  # a number of NumPy
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if type(value) is dict:
        return {name: _plain(item, f"{key}.{name}") for name, item in value.items()}
    kind = type(value).__name__
    raise ConfigError(f"{key} is a {kind}; conf.yaml holds numbers, text, None, and lists and dicts of these")


def _literal(value: Any) -> str:
    """Write a plain value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return quote(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
