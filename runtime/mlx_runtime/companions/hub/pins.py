"""Names of repositories on the Hugging Face Hub in a config, pinned to a commit by `revision: 3f2a…` in the node.

Only runs and `bind` pin names, because this may need a request to the Hub. Pinned names need none.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.config.constructors.declarations import FROM_PRETRAINED, library_of
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.errors import ConfigError, short_message
from mlx_runtime.extras import require

NAMES = ("pretrained_model_name_or_path", "model_id", "path")
"""Arguments that contain the name of a repository; otherwise, it is the first positional one."""

ASKED_WITH = ("cache_dir", "local_files_only", "token")
"""Arguments of a node that are passed on when its repository is looked up."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Pin(NamedTuple):
    """A node of a config that names a repository of the Hub."""

    key: str
    node: Any
    repository: str
    kind: str  # "model" or "dataset"

    @property
    def commit(self) -> str | None:
        """Commit to which the node is pinned, or None."""
        revision = self.node.get("revision")
        return revision if isinstance(revision, str) and _COMMIT.fullmatch(revision) else None

    @property
    def latest(self) -> "Pin":
        """The same repository at its default branch."""
        return self._replace(node={name: item for name, item in self.node.items() if name != "revision"})

    @property
    def moves(self) -> bool:
        """True if the node names the default branch, or no revision."""
        return self.node.get("revision") in (None, "main")


def pins(tree: Any, key: str = "") -> Iterator[Pin]:
    """Yield the nodes at and below a key that name repositories of the Hub or missing folders, outermost first."""
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from pins(item, f"{key}[{index}]")
    if not isinstance(tree, Mapping):
        return
    target = str(tree.get("_target_", ""))
    kind = "dataset" if target in ("datasets.load.load_dataset", "datasets.load_dataset") else "model"
    if kind == "dataset" or (target.endswith(".from_pretrained") and _on_hub(target)):
        positional = tree.get("_args_")
        first = positional[:1] if isinstance(positional, list) else []
        name = next((tree[item] for item in NAMES if item in tree), first[0] if first else None)
        folder = kind == "model" and "://" not in str(name)
        if isinstance(name, str) and (folder or _REPOSITORY.fullmatch(name)) and not _is_local(name, kind):
            yield Pin(key, tree, name, kind)
    for name, item in tree.items():
        yield from pins(item, f"{key}.{name}".lstrip("."))


def _on_hub(target: str) -> bool:
    try:
        return library_of(object_at(target)) in FROM_PRETRAINED  # False for a function of the user
    except (ImportError, AttributeError):
        return False


def _is_local(name: str, kind: str) -> bool:
    builders: Collection[str] = ()
    if kind == "dataset":
        with contextlib.suppress(ImportError):
            from datasets import packaged_modules

            builders = packaged_modules._PACKAGED_DATASETS_MODULES  # like "json", a builder that reads files
    return name in builders or Path(name).exists()


def commit_of(pin: Pin) -> str:
    """Return the commit of a node's revision, from the Hub or else from the cache of this machine.

    Raises:
        ConfigError: there is no such folder, repository or revision, or it is not cached and the Hub cannot be reached.
    """
    if not _REPOSITORY.fullmatch(pin.repository):
        cure = "name another, or a repository of the Hugging Face Hub"
        raise ConfigError(f"{pin.key}: there is no folder {pin.repository} with a model; {cure}")
    revision = pin.node.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise ConfigError(f"{pin.key}.revision is {revision!r}, which is no text; write it in quotes: \"'{revision}'\"")
    asked = tuple((name, pin.node[name]) for name in ASKED_WITH if name in pin.node)
    try:
        return pin.commit or look_up(pin.kind, pin.repository, revision, asked)
    except ConfigError as error:
        raise ConfigError(f"{pin.key}: {error}") from error


@functools.cache
def look_up(kind: str, repository: str, revision: str | None, asked: tuple[tuple[str, Any], ...]) -> str:
    subject = f"the {kind} {repository}"
    require("huggingface_hub", f"{subject} on the Hugging Face Hub")
    from huggingface_hub import errors, resolve_revision

    try:
        options = dict(asked) | ({"local_files_only": True} if offline() else {})
        return str(resolve_revision(repository, repo_type=kind, revision=revision, **options).resolved)
    except Exception as error:  # of the connection, in several libraries
        match error:
            case errors.RevisionNotFoundError():
                why = f"has no revision {revision!r} on the Hub; name another, or none for the latest"
            case errors.GatedRepoError():
                why = "is gated: request access on its page, and log in with: hf auth login"
            case errors.RepositoryNotFoundError():
                why = "is not on the Hub, or not visible with this token; check its name, and if it is private, log in "
                why += "with hf auth login, or set HF_TOKEN"
            case errors.RevisionResolutionError():
                cause = "HF_HUB_OFFLINE is set" if offline() else "the Hub cannot be reached"
                why = f"is not in the cache of this machine, and {cause}; connect once to download it, or use a "
                why += "local folder"
            case errors.HfHubHTTPError() if error.response is not None and error.response.status_code in (401, 403):
                why = "cannot be read, because the Hub does not accept the token; set HF_TOKEN to a valid one, or run "
                why += "hf auth login"
            case _:
                why = f"cannot be looked up on the Hub: {short_message(error)}"
        raise ConfigError(f"{subject} {why}") from error


def pin_defaults(tree: dict[str, Any], file: Mapping[str, Any], find: Callable[[Pin], str] = commit_of) -> list[str]:
    """Pin the defaults of the code that use the default branch of a repository. Return notices for the user.

    A revision in conf.yaml stays, unless it belongs to the name of another repository.

    Args:
        tree: nodes of the code's defaults, which are changed.
        file: content of conf.yaml.
        find: returns the commit of a repository.
    """
    present = {pin.key: pin for pin in pins(file)}
    notices, found = [], dict[tuple[str, str], str | None]()
    for pin in list(pins(tree)):
        if not pin.moves:
            continue
        before = present.get(pin.key, pin)
        if before is not pin and before.repository == pin.repository and before.node.get("revision"):
            pin.node["revision"] = before.node["revision"]
            continue
        name = (before.kind, before.repository)
        if name not in found:
            try:
                found[name] = find(before.latest)
            except ConfigError as error:
                found[name] = None
                notices.append(str(error))
        if (commit := found[name]) is not None:
            pin.node["revision"] = commit
    return notices


def pin_revisions(
    tree: dict[str, Any],
    unresolved: dict[str, Any],
    file: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    find: Callable[[Pin], str] = commit_of,
) -> None:
    """Pin all nodes of a run's config that name a branch or a tag, in both of its trees.

    A commit in conf.yaml belongs to the repository named there. If an override names another one, the commit is
    replaced.

    Args:
        tree: the config.
        unresolved: the same with references to environment variables.
        file: the conf.yaml that the config was composed from.
        before: config of the run to resume; repositories in it keep their commits.
        find: returns the commit of a repository.

    Raises:
        ConfigError: a revision cannot be found.
    """
    in_file = {pin.key: pin for pin in pins(file)}
    kept = {(pin.key, pin.repository): pin for pin in pins(before or {})}
    for pin in list(pins(tree)):
        of_file, commit = in_file.get(pin.key, pin), pin.commit
        if of_file.repository != pin.repository and of_file.commit == commit is not None:
            commit = find(pin.latest)
        elif commit is None:
            commit = find(kept.get((pin.key, pin.repository), pin))
        pin.node["revision"] = commit
        node = _at(unresolved, pin.key)
        if isinstance(node, dict):
            node["revision"] = commit


def repositories_of(tree: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the repositories of a run for its record, by key: their names, kinds and commits."""
    return {
        pin.key: {"repository": pin.repository, "kind": pin.kind, "revision": pin.commit or "?"} for pin in pins(tree)
    }


def _at(tree: Any, key: str) -> Any:
    """Return the value at a key like `models.net.layers[0]`, or None."""
    for part in re.findall(r"[^.\[\]]+", key):
        try:
            tree = tree[int(part)] if isinstance(tree, list) else tree[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return tree


def offline() -> bool:
    """Return True if `HF_HUB_OFFLINE` keeps huggingface_hub from connecting."""
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())
