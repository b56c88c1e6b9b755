"""Read untrusted JSON and YAML, and reject documents that are too large or have unexpected fields; write YAML."""

import datetime
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

DEPTH = 50
"""Maximum nesting of a YAML file."""

NODES = 200_000
"""Maximum number of values in a YAML file, each counted as often as aliases repeat it."""

LARGEST = 2**63
"""Limit for integers; larger ones cannot be printed or stored everywhere."""

AMBIGUOUS = re.compile(
    r"[-+.]*\d|([-+._]*|[-+]?\.(inf|nan)|true|false|yes|no|on|off|null|~|=|<<)\Z|.*[\x85\u2028\u2029]",
    re.IGNORECASE | re.DOTALL,
)
"""Beginnings of text that YAML 1.1 or 1.2 would read as a number, date, word or line break if it were not in quotes."""

ESCAPE = "for a literal ${, write \\${"
"""Cure for text with a `${` that begins no reference."""

NAME_BYTES = 200
"""Maximum length of a name. File systems allow 255 bytes; temporary files add a prefix and a suffix."""


@dataclass(frozen=True)
class Kind:
    """Type of a field of a document: its name in error messages, like `a number`, and the check of its values."""

    title: str
    fits: Callable[[Any], bool]

    def or_null(self) -> "Kind":
        return Kind(f"{self.title} or null", lambda value: value is None or self.fits(value))


def is_name(value: Any) -> bool:
    """Return True for a valid name of a file or folder: printable, easy to type, and not a path or hidden."""
    if not isinstance(value, str) or not value or not value.isprintable() or value != value.strip():
        return False
    return value[0] not in ".-" and not {*"/\\?#"} & {*value} and len(value.encode()) <= NAME_BYTES


def name_problem(title: str, value: Any) -> str | None:
    """Return why a value, which messages call `title`, is not a valid name, or None."""
    if is_name(value):
        return None
    return (
        f"{title} is {value!r:.100}, which is not a valid folder name; leave out / \\ ? #, line breaks and other "
        "characters that do not print, a leading dot or dash, and spaces around it, and use at most "
        f"{NAME_BYTES} bytes"
    )


def stays_below(value: Any) -> bool:
    """Return True for a relative path, separated by `/`, that stays below its root.

    Unlike names, its parts may be hidden files.
    """
    return isinstance(value, str) and all(
        part not in ("", ".", "..") and part.isprintable() and "\\" not in part and len(part.encode()) <= 255
        for part in value.split("/")
    )


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAME = Kind("the name of a file or folder", is_name)
COUNT = Kind("a whole number", lambda value: type(value) is int and abs(value) < LARGEST)
NUMBER = Kind("a number", lambda value: COUNT.fits(value) or isinstance(value, float))
SCALAR = Kind("text, a number or a flag", lambda v: v is None or isinstance(v, (str, bool)) or NUMBER.fits(v))
TIME = Kind("a time with its offset from UTC", _is_time)


_PLAIN = {  # numbers of user code may be larger than those of documents
    **{str: TEXT, bool: FLAG, int: Kind("a whole number", lambda value: type(value) is int)},
    float: Kind("a number", lambda value: type(value) in (int, float)),
    **{type(None): Kind("null", lambda value: value is None), Any: Kind("anything", lambda value: True)},
}


def one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def list_of(kind: Kind) -> Kind:
    return Kind(f"a list of {kind.title}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def mapping_of(kind: Kind, names: Kind = TEXT) -> Kind:
    return Kind(
        f"a mapping of {names.title} to {kind.title}",
        lambda value: isinstance(value, dict) and all(map(names.fits, value)) and all(map(kind.fits, value.values())),
    )


def mapping_with(shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> Kind:
    """Return the type of a mapping with these fields; other fields may have any value."""
    return Kind("a mapping", lambda value: isinstance(value, dict) and misfit(value, shape, needs) is None)


def kind_of(hint: Any) -> Kind:
    """Return the type of a field of a dataclass, given its type hint. A tuple is a list in a document."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind_of(argument) for argument in arguments]
        return Kind(" or ".join(kind.title for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))
    if origin is tuple:
        return list_of(kind_of(arguments[0]))
    if origin is Mapping:
        return mapping_of(kind_of(arguments[1]))
    return _PLAIN[hint]


def misfit(document: Any, shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> str | None:
    """Describe the first field that is missing or has the wrong type; return None if there is none."""
    if not isinstance(document, dict):
        return f"it is {_format_value(document)}, not a mapping"
    for name in needs:
        if name not in document:
            return f"{name} is missing"
    for name, value in document.items():
        kind = shape.get(name)
        if kind is not None and not kind.fits(value):
            wanted = f"{kind.title} of the right shape" if isinstance(value, dict) else kind.title
            return f"{name} is {_format_value(value)}, not {wanted}"
    return None


def _format_value(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    text = "null" if value is None else ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def from_json(content: bytes, shape: Mapping[str, Kind], needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a JSON document. Raises ValueError, with one line, if they have another shape."""
    try:
        document = json.loads(content)
        if rb"\ud" in content.lower():  # half of a surrogate pair, which cannot be printed or stored
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds text that is not Unicode") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if problem := misfit(document, shape, needs):
        raise ValueError(problem)
    return document  # type: ignore[no-any-return]


def from_yaml(content: bytes) -> Any:
    """Return a YAML mapping as OmegaConf reads it, with unresolved `${...}`.

    Raises ValueError with a message of one line if it is not a mapping, too large or nested too deeply.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import GrammarParseError

    _check_size(content)
    try:
        document = OmegaConf.create(content.decode())
    except GrammarParseError as error:
        raise ValueError(f"{error.full_key}: {yaml_message(error)}; {ESCAPE}") from error
    except Exception as error:  # YAML and OmegaConf raise many types of exceptions
        raise ValueError(yaml_message(error)) from error
    if not isinstance(document, DictConfig):
        raise ValueError("it is not a mapping")
    if odd := [name for name in document if not isinstance(name, str)]:
        raise ValueError(f"the key {odd[0]!r} is not text; write it in quotes")
    return document


def from_plain_yaml(content: bytes) -> dict[str, Any]:
    """Return a YAML mapping of another program, in which `${...}` is text. Raises ValueError like `from_yaml`."""
    import yaml

    _check_size(content)
    load: Any = yaml.safe_load  # has no annotations
    try:
        document = load(content)
    except Exception as error:  # also those of its constructors and of recursion
        raise ValueError(yaml_message(error)) from error
    if not isinstance(document, dict):
        raise ValueError("it is not a mapping")
    return document


def yaml_message(error: Exception) -> str:
    """Return the message of a YAML parser in one line, without its name for the text, because callers name the file."""
    message = " ".join(str(error).split()).replace(' in "<unicode string>", ', " in ")
    return message.partition(" full_key: ")[0]  # of OmegaConf


def to_yaml(tree: Any) -> str:
    """Return YAML that every reader understands alike, with keys in the given order.

    Text of several lines becomes a block, and text that YAML 1.1 or 1.2 would read as something else is in quotes.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # write equal parts out, without anchors

        def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> Any:
            if tag == "tag:yaml.org,2002:str":
                style = '"' if AMBIGUOUS.match(value) else "|" if "\n" in value else style
            represent: Any = super().represent_scalar
            return represent(tag, value, style)

    dump: Any = yaml.dump  # has no annotations
    return str(dump(tree, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True))


def scalar_text(content: bytes, key: str) -> str | None:
    """Return a number or word of a YAML document as it is typed there, by a key like `tools.times[0]`, or None."""
    import yaml

    compose: Any = yaml.compose  # has no annotations
    node = compose(content.decode(), Loader=yaml.SafeLoader)
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.SequenceNode):
            node = node.value[int(part)]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for name, value in node.value if name.value == part), None)
    return node.value if isinstance(node, yaml.ScalarNode) and "${" not in node.value else None


def _check_size(content: bytes) -> None:
    """Check the size of a YAML document before it is built: aliases can make a small file expand without bound."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    parse: Any = yaml.parse  # has no annotations
    sizes: dict[str | None, int] = {}  # values in each node with an anchor
    open_nodes: list[tuple[str | None, int]] = []
    count = 0
    try:
        for event in parse(content.decode(), Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"the alias *{event.anchor:.40} is recursive, or has no anchor before it")
                count += sizes[event.anchor]
            elif isinstance(event, yaml.NodeEvent):
                open_nodes.append((event.anchor, count))
                sizes.pop(event.anchor, None)  # until it is complete
                count += 1
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                sizes[anchor] = count - before
            if len(open_nodes) > DEPTH:
                raise ValueError(f"it is nested more than {DEPTH} levels deep")
            if count > NODES:
                raise ValueError(f"it has more than {NODES:,} values")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(yaml_message(error)) from error


def now() -> str:
    """Return the current time in UTC, to the millisecond, in ISO format."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
