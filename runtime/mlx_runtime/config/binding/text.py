"""conf.yaml as text: exact values, with the user's comments in place."""

import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tokens import CommentToken

from mlx_runtime.errors import BindError
from mlx_runtime.storage.documents import AMBIGUOUS, yaml_message
from mlx_runtime.storage.local import IrregularError, regular


def yaml_text(tree: Any) -> str:
    """Write a tree as YAML."""
    stream = io.StringIO()
    _yaml().dump(quote_strings(tree), stream)
    return stream.getvalue()


def read_text(file: Path) -> str:
    """Return the content of a file, or "" if it does not exist; raise BindError if it is not text."""
    try:
        with open(file, encoding="utf-8", opener=regular) as stream:
            return stream.read()
    except FileNotFoundError:
        return ""
    except (IrregularError, IsADirectoryError) as error:
        raise BindError(f"{file} is not a regular file") from error
    except UnicodeDecodeError as error:
        raise BindError(f"{file} is not UTF-8 text: {error}") from error


def commented_map(text: str, title: object) -> CommentedMap:
    """Read a mapping with its comments, its order and its quotes."""
    try:
        tree = _yaml().load(text)
    except Exception as error:  # ruamel raises many types of exceptions, all with the same meaning
        raise BindError(f"{title} is not valid YAML: {yaml_message(error)}") from error
    if not isinstance(tree, CommentedMap):
        raise BindError(f"{title} is not a mapping of groups; remove it and bind again")
    return tree


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    yaml.representer.add_representer(  # the default writes None as an empty value
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.representer.add_representer(float, _write_float)
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _write_float(writer: Any, value: float) -> Any:
    node = writer.represent_float(value)
    node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)  # in YAML 1.1, 1e-08 is text
    return node


def quote_strings(value: Any) -> Any:
    """Prepare a value for the writer: quote strings that YAML 1.1 or 1.2 would not read as strings."""
    if isinstance(value, CommentedMap | CommentedSeq):
        return value  # read from the file, or already prepared
    if isinstance(value, dict):
        return CommentedMap((quote_strings(name), quote_strings(item)) for name, item in value.items())
    if isinstance(value, list):
        return [quote_strings(item) for item in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) and AMBIGUOUS.match(value) else value


def remove_key(mapping: CommentedMap, name: str) -> str:
    """Remove a key and return the comment on its line. Comments below it belong to the next key, and stay."""
    comments, slot = _comments_behind(mapping, name)
    is_leaf = not isinstance(mapping[name], CommentedMap | CommentedSeq)
    own, _, below = comments[slot].value.partition("\n") if comments[slot] is not None else ("", "", "")
    above = list(mapping)[: list(mapping).index(name)]
    if below.strip() and above:  # ruamel keeps comments with the value above them
        comments, slot = _comments_behind(mapping, above[-1])
        token = comments[slot]
        before = token.value.rstrip("\n") if token is not None else ""
        mark = token.start_mark if token is not None else CommentMark(0)
        comments[slot] = CommentToken(f"{before}\n{below}", mark, None)
    del mapping[name]
    mapping.ca.items.pop(name, None)
    return own.strip() if is_leaf else ""


def _comments_behind(holder: Any, last: Any) -> tuple[list[Any], int]:
    """Return the place of the comment behind a value in ruamel: the last leaf below its key."""
    while isinstance(holder[last], CommentedMap | CommentedSeq) and holder[last]:
        holder = holder[last]
        last = list(holder)[-1] if isinstance(holder, CommentedMap) else len(holder) - 1
    slot = 2 if isinstance(holder, CommentedMap) else 0
    return holder.ca.items.setdefault(last, [None] * 4), slot
