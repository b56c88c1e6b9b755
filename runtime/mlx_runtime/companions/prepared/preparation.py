"""Find the prepared datasets that match a config, and write missing ones."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from mlx_runtime.companions.prepared.fingerprints import Candidate
from mlx_runtime.companions.prepared.store import PreparedSet, Store
from mlx_runtime.data.batches import dataset_error
from mlx_runtime.data.sampling import LOADER_ARGUMENTS
from mlx_runtime.errors import USER_ERRORS, MlxError, short_message

if TYPE_CHECKING:
    from mlx_runtime.companions.prepared.mapping import Cluster, Progress


def find(
    candidates: Sequence[Candidate],
    root: str,
    tell: Callable[[str], None],
    ray_needed: Callable[[], object] = lambda: None,
) -> dict[str, PreparedSet]:
    """Return the prepared datasets in a store that match the datasets of a config, by name in `Datasets`.

    The driver constructs a dataset only if there is a prepared one with the same code and arguments. Before a
    stream of Ray Data is created, `ray_needed` must start Ray unless it is running; otherwise Ray would start itself,
    or join another Ray on this machine. `tell` is called with lines for the user.
    """
    store = Store(root)
    names = store.names()
    prepared = {}
    for candidate in candidates:
        manifests = [store.find(name) for name in names if name.startswith(f"{candidate.cls.__name__}-")]
        of_arguments = [item for item in manifests if item and candidate.describes(item)]
        is_current = any(item.name.startswith(candidate.prefix) for item in of_arguments)
        is_damaged = not is_current and any(store.is_damaged(n) for n in names if n.startswith(candidate.prefix))
        if candidate.refusal or not (of_arguments or is_damaged):
            continue
        title = f"datasets.{candidate.name}: its prepared dataset"
        unused = f"{title} is {{}}; reading samples. Prepare again with --prepare-batches"
        if not is_current:
            tell(unused.format("damaged" if is_damaged else "stale because its code changed"))
            continue
        if candidate.streamed:
            ray_needed()
        try:
            dataset = candidate.make()
            name = candidate.full_name(dataset)
            manifest = store.find(name)
        except Exception as error:  # workers may be able to construct it
            tell(f"{title} is not used: {short_message(error)}")
            continue
        if manifest is None:
            tell(unused.format("damaged" if store.is_damaged(name) else "stale because its data changed"))
            continue
        prepared[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return prepared


def make(
    candidates: Sequence[Candidate], root: str, tell: Callable[[str], None], progress: "Progress", cluster: "Cluster"
) -> dict[str, PreparedSet]:
    """Prepare all datasets of a config that are not prepared yet.

    Raises:
        DatasetError: A dataset cannot be prepared; the message explains how to fix it.
        StorageError: The store cannot be written.
    """
    from mlx_runtime.companions.prepared.mapping import (  # here, because it imports Ray
        write_iterable,
        write_rows,
        write_stream,
    )

    store = Store(root)
    prepared = {}
    for candidate in candidates:
        if candidate.refusal:
            tell(f"datasets.{candidate.name} is not prepared: {candidate.refusal}")
            continue
        started = time.monotonic()
        try:
            dataset = candidate.make()
            name = candidate.full_name(dataset)
            manifest = store.find(name)
            if manifest is None:
                write = write_stream if candidate.streamed else write_rows
                if isinstance(dataset, IterableDataset):
                    write = write_iterable
                manifest = write(candidate, dataset, store, name, progress, cluster)
                size = f"{manifest.rows:,} rows, {manifest.size_bytes / 1e6:,.1f} MB"
                tell(f"datasets.{candidate.name} is prepared: {size} in {time.monotonic() - started:.1f} s")
        except MlxError:
            raise
        except USER_ERRORS as error:
            raise dataset_error(error, f"datasets.{candidate.name} cannot be prepared") from error
        prepared[candidate.name] = PreparedSet(root, manifest, _attributes(dataset))
    return prepared


def _attributes(dataset: Any) -> dict[str, Any]:
    names = (*LOADER_ARGUMENTS, "training", "row_counts")
    return {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
