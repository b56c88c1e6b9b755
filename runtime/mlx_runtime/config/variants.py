"""Variants: named alternatives for parts of conf.yaml, as files in the folder `variants` next to it.

`models.net/resnet.yaml` is an alternative for the node at `models.net`; conf.yaml, an override or another variant
chooses it by its name. Without `_target_` it is a patch, which changes the arguments that it lists. `debug.yaml` holds
values for any keys, which `--variant=debug` applies to conf.yaml.

Hydra's config groups are not used, because they would be merged into the node instead of replacing it, need a list of
defaults in conf.yaml, and interpret every string at the key as a name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mlx_runtime.config.constructors.targets import loaded_object_at
from mlx_runtime.errors import ConfigError, UsageError, suggest
from mlx_runtime.storage.documents import from_yaml
from mlx_runtime.storage.local import read_regular

OPTION = "--variant="


class Variants:
    """The variants next to a conf.yaml.

    Attributes:
        nodes: files with an alternative for one node, by key and name.
        partial: files with values for any keys, by name.
        texts: contents to use instead of those on disk.
    """

    def __init__(self, conf: Path) -> None:
        self.folder = conf.parent / "variants"
        self.partial = _files(self.folder)
        self.nodes = {item.name: files for item in sorted(self.folder.glob("*")) if (files := _files(item))}
        self.texts: dict[Path, str] = {}

    def file(self, key: str, name: Any) -> Path | None:
        """Return the file of a variant of the node at `key`; None if `name` is any other value."""
        return self.nodes.get(key, {}).get(name) if isinstance(name, str) else None

    def read(self, file: Path) -> Any:
        """Return the content of a variant, with unresolved `${...}`."""
        text = self.texts.get(file)
        content = read_regular(file, ConfigError) if text is None else text.encode()
        try:
            return OmegaConf.to_container(from_yaml(content))
        except ValueError as error:
            raise ConfigError(f"{file} is not valid YAML: {error}") from error


class Selection:
    """A config in which variants are chosen, beginning with those that conf.yaml names.

    Attributes:
        tree: the config, with unresolved `${...}`.
        chosen: the overrides and options that chose a variant, as typed.
        overrides: the other overrides, as typed, by the key that they set.
        left_out: arguments of the file that another class has replaced, by the key of its node.
    """

    def __init__(self, variants: Variants, conf: bytes, *, names: bool = True) -> None:
        """Read a conf.yaml; raise ValueError if it is not YAML. Without `names`, its strings never name variants."""
        self.variants = variants
        tree: Any = OmegaConf.to_container(from_yaml(conf))
        self.tree: dict[str, Any] = tree
        self.chosen: list[str] = []
        self.overrides: dict[str, str] = {}
        self.left_out: dict[str, list[str]] = {}
        self._sources: dict[str, Path | None] = {}  # source of the values at and below a key; None means an override
        for name, value in self.tree.items() if names else ():
            self._set(self.tree, name, value, name)

    @property
    def files(self) -> list[Path]:
        """The variants in use."""
        return list(dict.fromkeys(file for file in self._sources.values() if file is not None))

    def source(self, key: str) -> Path | None:
        """Return the variant that contains the value at a key; None if it is not from a variant."""
        tops = [top for top in self._sources if key == top or key.startswith((f"{top}.", f"{top}["))]
        return self._sources[max(tops, key=len)] if tops else None

    def override(self, key: str) -> str | None:
        """Return the override that set the value at a key, a value in it, a node around it, or its `_target_`."""
        here = f"{key}.".replace("[", ".")
        tops = [top for top in self.overrides if here.startswith(f"{top.removesuffix('._target_')}.")]
        tops = tops or [top for top in self.overrides if top.startswith(here)]
        return self.overrides[max(tops, key=len)] if tops else None

    def mark(self, key: str, file: Path | None) -> None:
        """Record the source of the values at and below a key."""
        others = {top: source for top, source in self._sources.items() if not f"{top}.".startswith(f"{key}.")}
        self._sources = {**others, key: file}

    def complete(self, settings: Mapping[str, Any]) -> None:
        """Add the values of `cfg` that the file does not list, including those in partly listed sections."""
        if isinstance(cfg := self.tree.get("cfg"), dict):
            for name, value in settings.items():
                path = value.get("_target_") if isinstance(value, dict) else None
                given = cfg.get(name, {} if path else value)
                completes = path and isinstance(given, dict) and given.get("_target_", path) == path
                cfg[name] = {**value, **given} if completes else given

    def choose(self, key: str, name: Any) -> bool:
        """Replace the node at a key by a variant; return False if `name` is any other value."""
        *parents, last = key.split(".")
        node: Any = self.tree
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if self.variants.file(key, name) is None or not isinstance(node, dict):
            return False
        self._set(node, last, name, key)
        return True

    def name_class(self, key: str, path: Any) -> None:
        """Give the node at a key another class, without the arguments of the former one."""
        node: Any = self.tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and not _same_class(node.get("_target_"), path):
            self.left_out[key] = [name for name in node if name not in ("_target_", "_partial_")]
            for name in self.left_out[key]:
                del node[name]

    def apply(self, name: str) -> None:
        """Apply the values of a partial config. Mappings change the values that they list, or replace a node."""
        file = self.variants.partial.get(name)
        if file is None:
            known = suggest(name, self.variants.partial)
            raise UsageError(f"there is no variant {name!r} in {self.variants.folder}.{known}")
        self._merge(self.tree, self.variants.read(file), file)

    def _merge(self, tree: dict[str, Any], changes: dict[str, Any], file: Path, prefix: str = "") -> None:
        for name, value in changes.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and "_target_" not in value and isinstance(tree.get(name), dict):
                self._merge(tree[name], value, file, f"{key}.")
            else:
                self.mark(key, file)
                self._set(tree, name, value, key)

    def _set(self, holder: dict[str, Any], name: str, value: Any, key: str) -> None:
        """Set a value, with variants in place of their names, or apply the variant if it is a patch."""
        if (file := self.variants.file(key, value)) is not None:
            variant = self.variants.read(file)
            if is_patch(variant):
                if not isinstance(node := holder.get(name), dict):
                    why = f"has no _target_, so it can only change a node, and {key} is {node!r}"
                    raise ConfigError(f"{file} {why}; choose it by {key}={value} in an override, or add a _target_")
                self._merge(node, variant, file, f"{key}.")
                return
            value = variant
            self.mark(key, file)
        holder[name] = value
        for child, item in value.items() if isinstance(value, dict) else ():
            self._set(value, child, item, f"{key}.{child}")


def _same_class(first: Any, second: Any) -> bool:
    """Return True if two paths name the same class, like `torch.optim.Adam` and `torch.optim.adam.Adam`."""
    if first == second:
        return True
    try:
        found = loaded_object_at(first)
        return found is not None and found is loaded_object_at(second)
    except (ImportError, AttributeError):
        return False


def is_patch(variant: Any) -> bool:
    """Return True if a variant changes arguments of a node instead of replacing it."""
    return isinstance(variant, dict) and "_target_" not in variant


def values_by_key(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values below a mapping by full key, mappings before their values."""
    if not isinstance(tree, dict):
        return {}
    values = {f"{prefix}{name}": value for name, value in tree.items()}
    for name, value in tree.items():
        values |= values_by_key(value, f"{prefix}{name}.")
    return values


def _files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
