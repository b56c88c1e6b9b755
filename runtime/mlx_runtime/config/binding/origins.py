"""The origins of the values of a config: the code's default, conf.yaml, a variant, or an override."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from ruamel.yaml.comments import CommentedMap

from mlx_runtime.config.binding.text import quote_strings, yaml_text
from mlx_runtime.config.composition import read
from mlx_runtime.config.interpolation import escape, resolve_config
from mlx_runtime.config.variants import Variants, values_by_key
from mlx_runtime.errors import UsageError, suggest
from mlx_runtime.settings import Settings


def dump(path: Path, defaults: Mapping[str, Any], overrides: Sequence[str], key: str | None, *, as_json: bool) -> str:
    """Return a config, or the part below a key, with the origin of each value that is not the code's default.

    In YAML, the origins are comments, and the last comment lists the variants; `defaults` is the tree of the code's
    defaults.
    """
    settings = {name: value for name, value in defaults.get("cfg", {}).items() if not name.startswith("_")}
    composition = read(path, overrides, settings)
    tree, selection = composition.tree, composition.selection
    variants = Variants(path)
    named = {"--variant": variants.partial, **variants.nodes}
    listed = {
        name: sorted(files) for name, files in named.items() if files and f"{name}.".startswith(f"{key or name}.")
    }
    every_key = values_by_key(tree)
    selected = read(path, selection.chosen, settings)
    code_tree = resolve_config(OmegaConf.create(dict(defaults)), environment=False)  # without escapes
    file, code = (_leaves(values_by_key(one)) for one in (selected.tree, code_tree))
    changed = {}
    for name, value in _leaves(every_key).items():
        variant = selected.selection.source(name)
        set_by = "MLX_STORAGE" if name == "cfg.storage_path" and Settings.read().storage else variant or "file"
        origin = "override" if name not in file or file[name] != value else str(set_by)
        if origin != "file" or name not in code or code[name] != value:
            default = {"default": code[name]} if name in code else {}
            changed[name] = {"value": value, "from": origin, **default}
    for part in key.split(".") if key else ():
        if not isinstance(tree, dict) or part not in tree:
            raise UsageError(f"there is no {key!r} in {path}.{suggest(key or '', every_key)}")
        tree = tree[part]
    if key:
        changed = {name: entry for name, entry in changed.items() if f"{name}.".startswith(f"{key}.")}
    if as_json:
        return json.dumps({"config": tree, "changed": changed, "variants": listed}, indent=2) + "\n"
    words = [f"{name}{' ' if name == '--variant' else '='}{file}" for name, files in listed.items() for file in files]
    last = f"# variants: {', '.join(words)}\n" if words else ""
    return yaml_text(_with_comments(escape(tree), key or "", changed)).removesuffix("...\n") + last


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, dict)}


def _with_comments(tree: Any, key: str, changed: Mapping[str, Any]) -> Any:
    """Add `# override (default: 3)` to changed values."""
    if not isinstance(tree, dict):
        return quote_strings(tree)
    commented = CommentedMap()
    for name, value in tree.items():
        here = f"{key}.{name}".lstrip(".")
        commented[quote_strings(name)] = _with_comments(value, here, changed)
        if here not in changed:
            continue
        entry = changed[here]
        default = f" (default: {json.dumps(entry['default'])})" if "default" in entry else ""
        if isinstance(value, list):
            commented.yaml_set_comment_before_after_key(name, before=f"{entry['from']}:", indent=2 * here.count("."))
        else:
            commented.yaml_add_eol_comment(f"{entry['from']}{default}", name)
    return commented
