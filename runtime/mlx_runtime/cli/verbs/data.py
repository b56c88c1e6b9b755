"""The verbs of `mlx data`: measure the storage, and remove parts of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from mlx_runtime import companions
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.lookup import StoragePath
from mlx_runtime.settings import Settings, environment
from mlx_runtime.storage.files import is_uri, prepared_root

if TYPE_CHECKING:
    from mlx_runtime.companions.prepared.store import Store
    from mlx_runtime.runs.folder import RunFolder
    from mlx_runtime.runs.outputs.usage import Survey


def show(path: str | None, depth: int, limit: int, ray_address: str | None = None) -> "Survey":
    """Measure the storage or a path below its root, through a cluster if this machine cannot see it.

    `depth` is the number of levels, `limit` the number of entries per folder to list; 0 for all.
    """
    from mlx_runtime.runs.outputs.usage import survey

    with environment({"RAY_ADDRESS": ray_address} if ray_address else {}, replace=True):
        root = lookup.storage_root()
        if not is_uri(root) and not Path(root).is_dir():
            raise UsageError(
                f"{root} does not exist on this machine; if only a cluster has it, pass --ray-address http://HEAD:8265"
            )
        return survey(StoragePath.parse(root, path), depth, limit)


def find_job(name: str, run: str) -> "RunFolder":
    """Return the folder of a data job in the storage."""
    from mlx_runtime.runs.outputs import jobs

    folder: RunFolder = jobs.find_job("" if "/" in name else lookup.storage_root(), name, run)
    return folder


def plan_removal(path: str) -> "tuple[StoragePath, Survey]":
    """Measure a file or folder below the root of the storage. Raises an error if it is a run or in use."""
    from mlx_runtime.runs.outputs import removal
    from mlx_runtime.runs.outputs.usage import survey

    target = StoragePath.parse(lookup.storage_root(), path)
    found = survey(target, 0, 0)
    removal.refuse_in_use(target, found)
    return target, found


def remove(target: StoragePath, found: "Survey") -> None:
    """Remove the target of `plan_removal`, unless it changed before the user confirmed."""
    from mlx_runtime.runs.outputs import removal

    again, present = plan_removal(target.title)
    if again != target or present.top != found.top:
        raise UsageError(
            f"{target.title} has changed since it was measured; nothing was removed. See: "
            f"mlx data show {'/'.join(target.parts)}"
        )
    removal.remove(target)


def prepared_store() -> "Store":
    """Return the store of prepared datasets of the experiment in the working directory, or in `MLX_STORAGE`."""
    path = lookup.conf_value("cfg.preparation.path")
    storage = Settings.read().storage or lookup.conf_value("cfg.storage_path")
    if storage is None and path is None:
        raise UsageError(lookup.NO_STORAGE)
    store: Store = companions.part("prepared.store").Store(prepared_root(storage or "", path))
    return store
