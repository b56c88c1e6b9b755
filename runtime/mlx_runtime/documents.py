"""Read JSON and YAML that anybody may have written: within limits and of the right shape, or refused with a reason."""

import datetime
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEPTH = 50
"""Levels of nesting that a file may have."""

NODES = 200_000
"""Values that a YAML file may have, each counted as often as aliases repeat it."""

LARGEST = 2**63
"""Integers are smaller; larger ones cannot be printed or stored everywhere."""


@dataclass(frozen=True)
class Kind:
    """What a field of a document may hold.

    Attributes:
        title: for error messages, like `a number`.
        fits: True for a value that is one.
    """

    title: str
    fits: Callable[[Any], bool]

    def or_null(self) -> "Kind":
        """The same, or null."""
        return Kind(f"{self.title} or null", lambda value: value is None or self.fits(value))


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
FILE_NAME = Kind("the name of a file", lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.-]+", value)))
COUNT = Kind("a whole number", lambda value: type(value) is int and abs(value) < LARGEST)
NUMBER = Kind("a number", lambda value: COUNT.fits(value) or isinstance(value, float))
TIME = Kind("a time with its offset from UTC", _is_time)


def one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def list_of(kind: Kind) -> Kind:
    return Kind(f"a list of {kind.title}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def mapping_of(kind: Kind) -> Kind:
    """Names to values of one kind."""
    return Kind(
        f"a mapping of names to {kind.title}",
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
    )


def mapping_with(shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> Kind:
    """Named values, each of its own kind; names that are not in the shape may hold anything."""
    return Kind("a mapping", lambda value: isinstance(value, dict) and misfit(value, shape, needs) is None)


def misfit(found: Any, shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a document; None when it has the shape.

    Args:
        found: what was read.
        shape: kinds of the fields that are known.
        needs: fields that must be there.
    """
    if not isinstance(found, dict):
        return f"it is {_shown(found)}, not a mapping"
    for name in needs:
        if name not in found:
            return f"{name} is missing"
    for name, value in found.items():
        kind = shape.get(name)
        if kind is not None and not kind.fits(value):
            wanted = f"{kind.title} of the right shape" if isinstance(value, dict) else kind.title
            return f"{name} is {_shown(value)}, not {wanted}"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    if type(value) is int and abs(value) >= LARGEST:
        return "a huge number"
    text = "null" if value is None else ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def from_json(content: bytes, shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a JSON document.

    Raises:
        ValueError: it is not JSON, too deep, or of another shape; the message is one line.
    """
    try:
        found = json.loads(content)
        if rb"\ud" in content.lower():  # half of a pair, which cannot be printed or stored
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds text that is not Unicode") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if problem := misfit(found, shape, needs):
        raise ValueError(problem)
    return found  # type: ignore[no-any-return]


def from_yaml(content: bytes) -> Any:
    """A YAML document as OmegaConf reads it, with `${...}` not resolved yet.

    Raises:
        ValueError: it is not YAML, too large, too deep, or no mapping; the message is one line.
    """
    from omegaconf import DictConfig, OmegaConf

    check_yaml(content)
    try:
        found = OmegaConf.create(content.decode())
    except Exception as error:  # YAML and OmegaConf raise many kinds
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(found, DictConfig):
        raise ValueError("it is not a mapping")
    if odd := [name for name in found if not isinstance(name, str)]:
        raise ValueError(f"the key {odd[0]!r} is not text; write it in quotes")
    return found


def selected(content: bytes, key: str) -> str | None:
    """One text or number of a YAML document, as text, its `${...}` resolved; None when it is not there.

    Raises:
        ValueError: the document or the value cannot be read; the message is one line.
    """
    from omegaconf import OmegaConf

    tree = from_yaml(content)
    try:
        found = OmegaConf.select(tree, key)
    except Exception as error:  # resolvers may raise anything
        raise ValueError(" ".join(str(error).split())) from error
    if found is not None and not isinstance(found, str | int | float):
        raise ValueError(f"{key} is not text")
    return None if found is None else str(found)


def check_yaml(content: bytes) -> None:
    """Measure a YAML document before anything is built from it: aliases can make a small file endless.

    Raises:
        ValueError: it is not YAML, too large or too deep.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    parse: Any = yaml.parse  # it has no annotations
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    count = 0
    try:
        for event in parse(content.decode(), Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"the alias *{event.anchor:.40} refers to nothing that is complete before it")
                count += sizes[event.anchor]
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                if event.anchor:
                    sizes[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, count))
                if event.anchor:
                    sizes.pop(event.anchor, None)
                count += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor:
                    sizes[anchor] = count - before
            if len(open_nodes) > DEPTH:
                raise ValueError(f"it is nested more than {DEPTH} levels deep")
            if count > NODES:
                raise ValueError(f"it has more than {NODES:,} values")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
