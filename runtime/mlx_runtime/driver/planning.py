"""Plans of runs: the choice of the engine, and all checks before anything is written."""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mlx_runtime import companions
from mlx_runtime.config.building import build, build_cfg
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data import batches
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.data.loaders import reading_processes
from mlx_runtime.driver.request import RunConfig, new_run
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.events import Event
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import TrainConfig, strategy_class
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints import store
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import is_uri, storage_at
from mlx_runtime.workers.placement import engine_class, engine_for

if TYPE_CHECKING:
    from mlx_runtime.data.folds import Fold
    from mlx_runtime.workers.protocol import Engine

Listener = Callable[[Event], object]


class RunExtension(Protocol):
    """Accompanies a run. Companions provide one for a setting, and any object of `cfg.callbacks` can be one.

    It is entered after the driver has claimed the run folder, before anything else is written, and exited after the
    outcome is recorded, before it is announced. A `MlxError` on entering fails the run; all other exceptions are
    reported, and the run continues without the extension.
    """

    def accompany(self, run: "AccompaniedRun") -> contextlib.AbstractContextManager[Listener | None]:
        """Return a context manager. A function that it yields is called with the events of the run, one at a time."""


@dataclass
class AccompaniedRun:
    """A run as seen by its extensions.

    Attributes:
        record: fields of `run.json`; `record.folder` is the folder of the run.
        stop: called with a reason, ends the run after a checkpoint. May be called from any thread.
        notify: sends an event, such as a `Notice`, to all listeners of the run. May be called from any thread.
        taken_over: True at the end if another driver owns the run folder now: do not write to it.
        interrupted: True at the end if the user pressed Ctrl-C: do not make them wait.
    """

    record: records.Record
    stop: Callable[[str], object]
    notify: Callable[[Event], object]
    taken_over: bool = False
    interrupted: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Everything that a driver needs to carry out a run."""

    experiment: type[BaseModule]  # importable by name
    config: RunConfig
    cluster: Cluster
    engine: "Engine"
    project: Path  # folder of the experiment
    extensions: tuple[RunExtension, ...] = ()  # they accompany the run in its driver
    fold: "Fold | None" = None  # rows of `datasets.train` to train on and to hold out; None without cross-validation


@contextlib.contextmanager
def connect(cfg: TrainConfig) -> Iterator[Cluster]:
    """Provide the machine or cluster that the run trains on.

    Raises:
        ConfigError: the workers do not fit, or `cfg.engine` cannot train them.
    """
    engine, why = engine_for(cfg)
    with engine_class(engine).connect(cfg, why) as cluster:
        yield dataclasses.replace(cluster, engine=engine)


@contextlib.contextmanager
def prepare_run(experiment: type[BaseModule], config: RunConfig, cluster: Cluster) -> Iterator[RunPlan]:
    """Check that a run can be carried out, and provide its plan within the block.

    Call it in the main thread, before others are started: the engine may fork this process.

    Raises:
        DatasetError: a dataset cannot be batched.
        ConfigError: the engine or the strategy cannot train this, the checkpoints of a run to resume are missing, or
            the rows of `datasets.train` cannot be split into folds.
        UsageError: the experiment has no `eval_loop` for an evaluation.
    """
    if (kind := strategy_class(config.cfg.strategy)).library != experiment.library:
        raise ConfigError(
            f"cfg.strategy={config.cfg.strategy} trains models of {kind.library}, but {experiment.__name__} has models "
            f"of {experiment.library}; change cfg.strategy, or the base classes of the experiment and TrainConfig"
        )
    if (number := config.cfg.cross_validation.fold) is not None:
        from mlx_runtime.data import folds

        config = dataclasses.replace(config, tree=folds.with_held_out(config.tree, number))
    check_datasets(config)
    check_optimizers(config)
    if config.checkpoint is not None and experiment.eval_loop is BaseModule.eval_loop:
        raise UsageError(
            f"{experiment.__name__} has no eval_loop(self, dataset_shards), which mlx train eval calls; "
            "write it in src/experiment.py, like worker_loop without the training"
        )
    project = Path.cwd()
    with contextlib.ExitStack() as stack:
        if not cluster.reads_streams and stream_names(config.tree):
            prepared = companions.part("prepared.datasets")
            cluster = stack.enter_context(prepared.cluster_for_streams(config, cluster, project))
        engine = _engine(config, cluster)
        stack.callback(engine.close)
        if config.run is not None:
            _require_checkpoint(config.run, config.cfg)
        if config.cfg.transfer:
            config = companions.part("surgery.transferring").pin(config)
        if config.run is None and (path := config.cfg.restore_checkpoint_path):
            before = store.read(path, whole=False).get("config")
            if before and config.checkpoint is None:
                from mlx_runtime.loop.resuming import changes_since

                config = dataclasses.replace(config, changes=changes_since(before, config))
        if not config.kept:
            config = stack.enter_context(_in_temporary_storage(config))
        fold = None
        if number is not None:
            before = records.load_record(config.run).get("fold") if config.run is not None else None
            again = new_run(config.run, config.cfg) if config.run is not None else ""
            fold = folds.fold_of(config, (before or {}).get("rows"), again)
        extensions = tuple(_extensions(config)) if config.kept else ()
        yield RunPlan(experiment, config, cluster, engine, project, extensions, fold)


def check_datasets(config: RunConfig) -> None:
    """Refuse datasets and a `cfg.loader` that no worker could read."""
    for name, node in config.tree.get("datasets", {}).items():
        target = object_at(node["_target_"]) if isinstance(node, dict) else None
        if isinstance(target, type):
            batches.check(target, f"datasets.{name}")
        if isinstance(node, dict) and isinstance(size := node.get("batch_size"), int) and size < 1:
            raise ConfigError(f"datasets.{name}.batch_size is {size}; the minimum is 1")
    reading_processes(config.cfg.loader)


def check_optimizers(config: RunConfig) -> None:
    """Refuse values that torch's optimizers refuse, like a negative lr. Other optimizers may need real parameters."""
    for name, node in config.tree.get("optimizers", {}).items():
        if isinstance(node, dict) and str(node.get("_target_")).startswith("torch.optim."):
            values = {key: value for key, value in node.items() if key != "params"}
            build(values, f"optimizers.{name}", params=[torch.nn.Parameter(torch.zeros(1, 1))])


def may_be_prepared(config: RunConfig) -> bool:
    """Return False if the run certainly neither reads nor makes prepared datasets."""
    how, root = config.cfg.preparation.mode, config.prepared_root
    return how == "make" or (how == "auto" and (is_uri(root) or Path(storage_at(root).path).is_dir()))


def _engine(config: RunConfig, cluster: Cluster) -> "Engine":
    """Create the engine. It may start a fork server, which must happen before any threads are started."""
    cfg = config.cfg
    timeout_s = max(1800.0, 2 * cfg.elastic.hang_timeout_s)  # of collectives, longer than deadlock detection
    engine = engine_class(cluster.engine)(cfg, cluster, timeout_s=timeout_s)
    if (local := sys.modules.get("mlx_runtime.workers.local")) is not None:
        local.cool_down()  # the command may have started it needlessly
    return engine


def _require_checkpoint(run: RunFolder, cfg: TrainConfig) -> None:
    """Refuse to resume a run whose checkpoints are missing, instead of starting it from scratch."""
    latest = records.load_record(run).get("latest")
    if latest and not store.CheckpointStore(run.checkpoints).any():
        raise ConfigError(
            f"{run.title} has saved checkpoints, the last one as {latest.get('path')}, but none is left in "
            f"{run.checkpoints}. Put one back, or start over in a new run: {new_run(run, cfg)}"
        )


def _extensions(config: RunConfig) -> Iterator[RunExtension]:
    """Yield the extensions of a run: those of companions, which may refuse it, and callbacks that are extensions."""
    for companion in companions.extensions_of(config.tree["cfg"]):
        yield companion.extension(config)
    yield from (item for item in config.cfg.callbacks.values() if hasattr(item, "accompany"))


@contextlib.contextmanager
def _in_temporary_storage(config: RunConfig) -> Iterator[RunConfig]:
    """Provide the same config without trackers and callbacks, in temporary storage that is removed after the block."""
    with tempfile.TemporaryDirectory(prefix="mlx-fast-", ignore_cleanup_errors=True) as storage:
        yield in_storage(config, storage)


def in_storage(config: RunConfig, storage: str, **changed: Any) -> RunConfig:
    """Return a config with another storage, without trackers and callbacks, and with changed settings of `cfg`.

    Prepared datasets are still read from the former storage.
    """
    mode = config.cfg.preparation.mode
    preparation = {"path": config.prepared_root, "mode": "auto" if mode == "make" else mode}  # it prepares nothing
    changed = {"storage_path": storage, "trackers": {}, "callbacks": {}} | changed
    changed["preparation"] = config.tree["cfg"]["preparation"] | preparation
    tree, unresolved = (one | {"cfg": one["cfg"] | changed} for one in (config.tree, config.unresolved))
    return dataclasses.replace(config, tree=tree, unresolved=unresolved, cfg=build_cfg(tree["cfg"], TrainConfig))
