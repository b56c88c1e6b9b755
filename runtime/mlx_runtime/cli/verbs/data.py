"""The verbs of `mlx data`: measure the storage, and remove parts of it."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.data.prepared import prepared_root
from mlx_runtime.errors import UsageError
from mlx_runtime.runs import lookup
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri
from mlx_runtime.training.engines.placement import JOB_FLAG

if TYPE_CHECKING:
    from mlx_runtime.data.prepared import Store
    from mlx_runtime.runs.lookup import StoragePath
    from mlx_runtime.runs.survey import Survey

ANSWER = "mlx-show "
"""Prefix of the line with the answer in the log of a job."""

SHOW_S = 600.0
"""How long a cluster may take to measure its storage."""


def show(path: str | None, depth: int, limit: int, ray_address: str | None = None) -> "Survey":
    """Measure the storage or a part of it, on a cluster if only that can see it.

    Args:
        path: path below the root of the storage; None for all of it.
        depth: levels to list.
        limit: entries to list per folder; 0 for all.
        ray_address: address of a cluster that can reach the storage if this machine cannot; by default `RAY_ADDRESS`.

    Raises:
        UsageError: the storage is not known, or has no such path.
        StorageError: the storage does not answer.
        ClusterError: the cluster does not answer.
    """
    from mlx_runtime.runs.lookup import StoragePath
    from mlx_runtime.runs.survey import Survey, survey

    root = lookup.storage_root()
    if is_uri(root) or Path(root).is_dir():
        return survey(StoragePath.parse(root, path), depth, limit)
    if JOB_FLAG in os.environ or not (ray_address or os.environ.get("RAY_ADDRESS")):
        raise UsageError(
            f"{root} does not exist on this machine; if only a cluster has it, pass --ray-address http://HEAD:8265"
        )
    options = ["--depth", str(depth), "--limit", str(limit), *([path] if path else [])]
    return Survey.from_json(_show_on_cluster(root, options, ray_address))


def _show_on_cluster(root: str, options: Sequence[str], ray_address: str | None) -> Any:
    """Return the output of `mlx data show --json`, run as a job on the cluster.

    Raises:
        UsageError: the job reports one.
        ClusterError: the cluster does not answer, or not in time.
    """
    from mlx_runtime.cluster.addresses import Address
    from mlx_runtime.cluster.dashboard import Dashboard, JobSpec, NoAnswerError
    from mlx_runtime.storage.uploads import Upload

    dashboard = Dashboard.connect(Address.parse(ray_address))
    command = ["python", "-u", "-m", "mlx_runtime", "data", "show", "--json", *options]
    with tempfile.TemporaryDirectory() as empty, Upload.of(Path(empty)).staged() as folder:
        spec = JobSpec(command, folder, {JOB_FLAG: "1", "MLX_STORAGE": root}, {"mlx": "show"})
        try:
            return dashboard.ask("mlx-show", spec, marker=ANSWER, timeout_s=SHOW_S)
        except NoAnswerError as error:
            lines = error.log.splitlines()
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            if errors:
                raise UsageError(f"on the cluster: {errors[-1]}") from error
            raise


def plan_removal(path: str) -> "tuple[StoragePath, Survey]":
    """Measure a file or folder in the storage, and refuse it if it must not be removed.

    Args:
        path: path below the root of the storage.

    Raises:
        UsageError: it does not exist, lies outside the storage, is a run, or is in use.
        StorageError: the storage does not answer.
    """
    from mlx_runtime.runs import removal
    from mlx_runtime.runs.lookup import StoragePath
    from mlx_runtime.runs.survey import survey

    target = StoragePath.parse(lookup.storage_root(), path)
    found = survey(target, 0, 0)
    removal.refuse_in_use(target, found)
    return target, found


def remove(target: "StoragePath", found: "Survey") -> None:
    """Remove what `plan_removal` returned, unless it changed while the user was being asked.

    Raises:
        UsageError: it has changed or is in use; nothing was removed.
        StorageError: not all of it could be removed.
    """
    from mlx_runtime.runs import removal

    again, present = plan_removal(target.title)
    if again != target or present.top != found.top:
        raise UsageError(
            f"{target.title} has changed since it was measured; nothing was removed. See: "
            f"mlx data show {'/'.join(target.parts)}"
        )
    removal.remove(target)


def prepared_store() -> "Store":
    """Return the prepared datasets of the experiment in the working directory, or of `MLX_STORAGE`.

    Raises:
        UsageError: neither is known.
    """
    path = lookup.conf_value("cfg.prepared_path")
    storage = Settings.read().storage or lookup.conf_value("cfg.storage_path")
    if storage is None and path is None:
        raise UsageError(lookup.NO_STORAGE)
    from mlx_runtime.data.prepared import Store

    return Store(prepared_root(storage or "", path))
