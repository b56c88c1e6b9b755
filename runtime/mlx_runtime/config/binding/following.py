"""Updates of variants after the code has renamed arguments or moved classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.comments import CommentedMap

from mlx_runtime.config.binding.merging import Changes, Merge
from mlx_runtime.config.binding.nodes import Description
from mlx_runtime.config.binding.text import rename_key
from mlx_runtime.config.constructors.signatures import parameters, takes_any_keyword
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.variants import values_by_key


@dataclass
class Follow:
    """Names that the code has renamed or moved since the last bind.

    `renamed` maps the full key of each argument to the former one. `moved` maps paths of classes that do not exist any
    more to the paths in the code's defaults.
    """

    renamed: Mapping[str, str]
    moved: Mapping[str, str]

    @classmethod
    def since(cls, former: Mapping[str, Any], description: Description, changes: Changes) -> "Follow":
        """Compare the code with the defaults at the last bind; `changes` are those of conf.yaml."""
        in_code = Merge.of_code(former, description.tree)
        now = values_by_key(description.tree)
        targets = {path: now.get(key, path) for key, path in former.items() if key.endswith("._target_")}
        moved = {path: new for path, new in targets.items() if new != path and not _exists(path)}
        return cls(in_code.renamed | changes.renamed, moved)

    def into(self, patch: CommentedMap, key: str, changes: Changes) -> None:
        """Update the values that a variant has at a key and below it."""
        self._move(patch, key, changes)
        for name, former in self.renamed.items():
            if key and not name.startswith(f"{key}."):
                continue
            *parents, last = name.removeprefix(f"{key}." if key else "").split(".")
            node: Any = patch
            for parent in parents:
                node = node.get(parent) if isinstance(node, dict) else None
            old = former.rpartition(".")[2]
            if not isinstance(node, CommentedMap) or "_target_" in node or old not in node or last in node:
                continue  # arguments of another class are not renamed
            rename_key(node, old, last)
            changes.renamed[name] = former

    def _move(self, node: Any, key: str, changes: Changes) -> None:
        for name, item in node.items() if isinstance(node, dict) else ():
            self._move(item, f"{key}.{name}".lstrip("."), changes)
        path = str(node.get("_target_")) if isinstance(node, dict) else ""
        new = self.moved.get(path)
        if new is not None and (path.rpartition(".")[2] == new.rpartition(".")[2] or _takes(new, node)):
            node["_target_"] = new
            changes.updated.append(f"{key}._target_")


def _exists(path: str) -> bool:
    try:
        object_at(path)
    except (ImportError, AttributeError):
        return False
    return True


def _takes(path: str, node: Mapping[str, Any]) -> bool:
    """Return True if a class has all arguments of a node, so that no value would be lost."""
    items = parameters(object_at(path)) or []
    return takes_any_keyword(items) or {name for name in node if not name.startswith("_")} <= {i.name for i in items}
