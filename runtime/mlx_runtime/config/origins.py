"""Where the values of a config come from: the code's default, conf.yaml, or an override."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from mlx_runtime.config.composition import keys_of, read
from mlx_runtime.config.text import yaml_text
from mlx_runtime.errors import UsageError, suggest

Tree = Mapping[str, Any]


def shown(path: Path, defaults: Tree, overrides: Sequence[str], key: str | None, *, as_json: bool) -> str:
    """Return a config as text, with the origin of each value that is not the code's default.

    Args:
        path: path of conf.yaml.
        defaults: the tree that the code describes.
        overrides: overrides in Hydra's grammar.
        key: return only what is below this key.
        as_json: return JSON instead of YAML with comments.

    Raises:
        UsageError: there is no such key.
    """
    tree: Any = read(path, overrides).tree
    every_key = keys_of(tree)
    final, file, code = (dict(_leaves(one)) for one in (tree, read(path, []).tree, defaults))
    changed = {}
    for name, value in final.items():
        if name not in file or file[name] != value:
            changed[name] = {"value": value, "from": "override", "default": code.get(name)}
        elif name not in code or code[name] != value:
            changed[name] = {"value": value, "from": "file", "default": code.get(name)}
    for part in key.split(".") if key else ():
        if not isinstance(tree, dict) or part not in tree:
            raise UsageError(f"there is no {key!r} in {path}.{suggest(key or '', every_key)}")
        tree = tree[part]
    below = {name: entry for name, entry in changed.items() if key is None or f"{name}.".startswith(f"{key}.")}
    if as_json:
        return json.dumps({"config": tree, "changed": below}, indent=2) + "\n"
    return yaml_text(_with_comments(tree, key or "", below)).removesuffix("...\n")


def _with_comments(tree: Any, key: str, changed: Mapping[str, Any]) -> Any:
    """Add `# override (default: 3)` to changed values."""
    if not isinstance(tree, dict):
        return tree
    commented = CommentedMap()
    for name, value in tree.items():
        here = f"{key}.{name}".lstrip(".")
        commented[name] = _with_comments(value, here, changed)
        if here not in changed:
            continue
        origin = changed[here]["from"]
        if isinstance(value, list):
            commented.yaml_set_comment_before_after_key(name, before=f"{origin}:", indent=2 * here.count("."))
        else:
            commented.yaml_add_eol_comment(f"{origin} (default: {json.dumps(changed[here]['default'])})", name)
    return commented


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a mapping, with its full key."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key, tree
