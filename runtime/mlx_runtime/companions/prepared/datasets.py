"""Prepared datasets of a run: selection, preparation if necessary, and protection from removal while in use."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mlx_runtime.companions.prepared import preparation
from mlx_runtime.companions.prepared.fingerprints import Candidate
from mlx_runtime.companions.prepared.store import PreparedSet, Store
from mlx_runtime.companions.ray.start import on_ray, start_ray
from mlx_runtime.config.building import declare_group
from mlx_runtime.config.constructors.declarations import Declaration
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.data.definitions import dataset_nodes, stream_names
from mlx_runtime.data.folds import with_held_out
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.driver.planning import check_datasets
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import ConfigError
from mlx_runtime.events import Event, Notice
from mlx_runtime.loop.job import Cluster
from mlx_runtime.storage.files import is_uri, storage_root
from mlx_runtime.tracking.console import Display
from mlx_runtime.workers.placement import usable_cores


def prepare(config: RunConfig) -> None:
    """Prepare all datasets of an experiment that can be prepared and are not yet.

    Raises:
        DatasetError: a dataset cannot be batched or prepared.
        StorageError: the store cannot be written.
    """
    check_datasets(config)
    display = Display(sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        if stream_names(config.tree):
            stack.enter_context(start_ray(config.cfg))
        sets, candidates = _make(config, Path.cwd(), display.handle, stack)
        alone = Topology(0, 1, torch.device("cpu"))
        preparation.write(sets, candidates, alone, usable_cores(), display.handle)
    if sets:
        display.print(f"{len(sets)} prepared in {config.prepared_root}; runs use them automatically")
    else:
        display.print("nothing was prepared")


def sets_of_run(
    config: RunConfig, project: Path, emit: Callable[[Event], None], stack: contextlib.ExitStack
) -> dict[str, PreparedSet]:
    """Return the prepared datasets to read instead of samples.

    If `cfg.preparation.mode` is `make`, that includes those which the workers have to write first. All are protected
    from removal until the stack is closed, and announced, if none has to be written.

    Raises:
        DatasetError: a dataset cannot be prepared.
        StorageError: the store cannot be written.
    """
    mode, max_bytes, sets = config.cfg.preparation.mode, config.cfg.preparation.max_gb * 1e9, dict[str, PreparedSet]()
    if mode == "make":
        sets, _ = _make(config, project, emit, stack)
    elif mode == "auto":
        for name, item in _find(config, project, lambda text: emit(Notice(text)), stack).items():
            store = Store(item.root)
            stack.enter_context(store.mark_used(item.manifest.name))
            if store.find(item.manifest.name) is not None:  # it was not removed before
                sets[name] = dataclasses.replace(item, max_bytes=max_bytes)
    if sets and not any(item.attempt for item in sets.values()):
        emit(preparation.announcement(sets))
    return sets


@contextlib.contextmanager
def cluster_for_streams(config: RunConfig, cluster: Cluster, project: Path) -> Iterator[Cluster]:
    """Provide the cluster, or an embedded Ray if some streams of Ray Data are not prepared.

    Raises:
        ConfigError: `cfg.engine` cannot read them.
    """
    streams = stream_names(config.tree)
    with contextlib.ExitStack() as stack:
        if streams and config.cfg.preparation.mode != "never":
            prepared = _find(config, project, lambda _: None, stack)
            streams = [name for name in streams if name not in prepared]
        if streams:
            why = f"datasets.{streams[0]} is an unprepared stream of Ray Data"
            if config.cfg.engine != "auto":
                raise ConfigError(
                    f"cfg.engine={config.cfg.engine} cannot train this: {why}; run mlx train prepare first, "
                    "or use cfg.engine=auto"
                )
            cluster = stack.enter_context(on_ray(config.cfg, why))
        yield cluster


def _find(
    config: RunConfig, project: Path, notify: Callable[[str], None], stack: contextlib.ExitStack
) -> dict[str, PreparedSet]:
    """Return existing prepared datasets that match the config; `notify` is called with a line per stale one.

    If rows of a stream must be compared with prepared ones, Ray runs until the stack is closed.
    """
    candidates, _ = _preparable(config, project)
    return preparation.find(
        candidates, config.prepared_root, notify, lambda: stack.enter_context(start_ray(config.cfg))
    )


def _make(
    config: RunConfig, project: Path, emit: Callable[[Event], None], stack: contextlib.ExitStack
) -> tuple[dict[str, PreparedSet], list[Candidate]]:
    candidates, left_out = _preparable(config, project)
    for name in left_out:
        emit(Notice(f"datasets.{name} is not prepared: the constructor of Datasets replaces it"))
    max_bytes = config.cfg.preparation.max_gb * 1e9
    return preparation.make(candidates, config.prepared_root, max_bytes, emit, stack), candidates


def _preparable(config: RunConfig, project: Path) -> tuple[list[Candidate], list[str]]:
    """Return the datasets of a config that can be prepared, and the names of the others.

    The constructor of `Datasets` may replace the datasets of conf.yaml with others.
    """
    tree, all_shown = (with_held_out(one, config.cfg.cross_validation.fold) for one in (config.tree, config.shown))
    nodes, shown = dataset_nodes(tree), all_shown.get("datasets", {})
    try:
        group = vars(declare_group(tree["datasets"], "datasets")) if nodes else {}
    except (ConfigError, TypeError):
        group = {}  # the constructor of Datasets reads them
    held = {name: group.get(name) for name in nodes}
    classes = {name: item.target if isinstance(item, Declaration) else type(item) for name, item in held.items()}
    kept = {name: node for name, node in nodes.items() if path_of(classes[name]) == node["_target_"]}
    seed, root = config.cfg.seed, storage_root(config.cfg.storage_path)
    storage = "" if is_uri(root) else os.path.realpath(root)
    candidates = [Candidate(name, node, shown.get(name, node), seed, project, storage) for name, node in kept.items()]
    return candidates, [name for name in nodes if name not in kept]
