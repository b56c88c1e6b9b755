"""Where each value of a config came from: the code's default, conf.yaml, or an override."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from mlx_runtime.binding import yaml_text
from mlx_runtime.errors import UsageError, near
from mlx_runtime.loading import composed, keys_of

Tree = Mapping[str, Any]


def shown(path: Path, defaults: Tree, overrides: Sequence[str], key: str | None, *, as_json: bool) -> str:
    """A config as text, each value that is not the code's default with its origin.

    Args:
        path: of conf.yaml.
        defaults: what the code says.
        overrides: Hydra's.
        key: show only what is below this key.
        as_json: JSON instead of YAML with comments.

    Raises:
        ConfigError: conf.yaml or an override cannot be read.
        UsageError: there is no such key.
    """
    tree: Any = composed(path, overrides)
    every_key = keys_of(tree)
    final, file, code = (dict(_leaves(one)) for one in (tree, composed(path, []), defaults))
    changed = {}
    for name, value in final.items():
        if name not in file or file[name] != value:
            changed[name] = {"value": value, "from": "override", "default": code.get(name)}
        elif name not in code or code[name] != value:
            changed[name] = {"value": value, "from": "file", "default": code.get(name)}
    for part in key.split(".") if key else ():
        if not isinstance(tree, dict) or part not in tree:
            raise UsageError(f"there is no {key!r} in {path}.{near(key or '', every_key)}")
        tree = tree[part]
    chosen = {name: entry for name, entry in changed.items() if key is None or f"{name}.".startswith(f"{key}.")}
    if as_json:
        return json.dumps({"config": tree, "changed": chosen}, indent=2) + "\n"
    return _annotated(tree, key or "", chosen)


def _annotated(tree: Any, key: str, changed: Mapping[str, Any]) -> str:
    """YAML with `# override (default: 3)` behind each changed value."""
    return yaml_text(_with_comments(tree, key, changed)).removesuffix("...\n")


def _with_comments(tree: Any, key: str, changed: Mapping[str, Any]) -> Any:
    if not isinstance(tree, dict):
        return tree
    made = CommentedMap()
    for name, value in tree.items():
        here = f"{key}.{name}".lstrip(".")
        made[name] = _with_comments(value, here, changed)
        if here in changed and not isinstance(value, list):
            made.yaml_add_eol_comment(
                f"{changed[here]['from']} (default: {json.dumps(changed[here]['default'])})", name
            )
        elif here in changed:
            made.yaml_set_comment_before_after_key(name, before=f"{changed[here]['from']}:", indent=2 * here.count("."))
    return made


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, by its full key."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key, tree
