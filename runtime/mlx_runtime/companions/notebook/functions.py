"""Training functions: the experiment whose loop calls one, and the functions that it may call."""

import base64
import contextlib
import functools
import inspect
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mlx_runtime import companions
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.companions.notebook.arrays import as_tensors, checkpoint_values
from mlx_runtime.companions.notebook.backends import with_backend
from mlx_runtime.companions.notebook.shards import FunctionShard, Shards
from mlx_runtime.data.loaders import DatasetShards
from mlx_runtime.distributed.collectives import agree, gather
from mlx_runtime.distributed.topology import Topology, current, device_here
from mlx_runtime.distributed.wrapping import prepare_model, unwrap
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.events import FunctionReport, FunctionReturned
from mlx_runtime.importing import after_import
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.optimization import prepare_models
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.storage.files import size_text, storage_root

CALLS = {"report": "call report", "save_checkpoint": "call save_checkpoint", "return": "return from the function"}
"""Steps that all workers must take together, in words for errors."""

MOST_BYTES = 64_000_000
"""Maximum size of a return value, because it passes through the driver."""


@dataclass
class FunctionConfig(TrainConfig):
    """Settings of a run that calls a function.

    Attributes:
        function: path of the function, like `src.training.train_func`, or `__main__.train_func` in a script or cell.
        function_file: name of its file in `inputs`.
        definitions: what it uses of `__main__`: each name with a digest, like `Net 1a2b3c4d`.
        backend: how workers are connected, besides torch: `jax`, `tensorflow`, or the import path of a class.
        config: its argument.
        checkpoint_file: name of the file of `inputs` that `load_checkpoint` reads until the run has its own checkpoint.
        dataset_files: names of the files of `inputs` with its datasets, by name.
        fold: number of the fold whose rows are held out, and number of folds; empty without folds.
        num_epochs: not used; the function determines the end.
    """

    function: str = ""
    function_file: str = field(default="", metadata={"resumable": True})  # pickled again, if it was removed
    definitions: list[str] = field(default_factory=list)
    backend: str = "torch"
    config: dict[str, Any] = field(default_factory=dict, metadata={"resumable": True})
    checkpoint_file: str = ""
    dataset_files: dict[str, str] = field(default_factory=dict)
    fold: tuple[int, ...] = ()
    num_epochs: int = 0


def load_function(cfg: TrainConfig) -> None:
    """Check the function of a run before it begins, in the process of its driver; not for the settings of other runs.

    Raises:
        ConfigError, StorageError: workers cannot load it.
    """
    if isinstance(cfg, FunctionConfig):
        inputs.check_function(storage_root(cfg.storage_path), cfg.function, cfg.function_file)


class FunctionExperiment(BaseModule):
    """The experiment that `Trainer.run` trains: its loop calls `cfg.function` on every worker."""

    def __init__(self, cfg: FunctionConfig) -> None:
        super().__init__(cfg=cfg)
        self.saved = _SavedArguments()
        if cfg.dataset_files:
            self.shards = Shards(cfg.dataset_files, cfg.fold)
        self._called: set[str] = set()  # calls of `report` and `save_checkpoint` in this epoch
        self._began = self._reported = time.time()
        self._saves = True  # each epoch is expected to have a checkpoint, until one has none

    @with_backend
    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        global _running
        self._session.counts_updates = False  # each call of `report` is a step
        if "ray" in companions.COMPANIONS:
            after_import("ray.train", lambda: companions.part("ray.private").call_functions(sys.modules[__name__]))
        path, root = self.cfg.function, self._session.context.folder.root
        function = inputs.load_function(root, path, self.cfg.function_file)
        if self.cfg.checkpoint_file and self.saved.restored is None:
            self.saved.restored = inputs.load_state(root, self.cfg.checkpoint_file)
        _running = self
        try:
            value = function(self.cfg.config) if takes_config(function, self.cfg.config) else function()
            self._agree("return")
        finally:
            _running = None
        rank, world_size = self._session.context.topology.rank, self._session.context.topology.world_size
        title = f"{path} returned a {type(value).__name__} on rank {rank}"
        try:
            pickled = pickle.dumps(tree_map(_on_cpu, value))
        except Exception as error:  # pickling can raise anything
            why = short_message(error)
            text = f"{title} that cannot be pickled: {why}. Return numbers, text, tensors or a state_dict"
            raise MlxError(text) from None
        if len(pickled) > MOST_BYTES:
            size = f"{title} of {size_text(len(pickled))}, and {size_text(MOST_BYTES)} is the maximum"
            raise MlxError(f"{size}; save it with save_checkpoint, and read it from trainer.latest_checkpoint")
        self._session.send(FunctionReturned(rank, world_size, base64.b64encode(pickled).decode()))

    def accelerate(self, model: nn.Module) -> nn.Module:
        context = self._session.context
        prepare_models([model.to(context.topology.device)], context.cfg, context.topology.device)
        return prepare_model(model)

    def shard(self, name: str | None) -> FunctionShard:
        if not self.cfg.dataset_files:
            raise MlxError("get_dataset_shard() needs a dataset; pass one: trainer.run(train_func, dataset=...)")
        return self.shards.get(name, self._session)

    def report(self, values: Mapping[str, float]) -> None:
        with _calling:
            self._begin("report", values.get("epoch"))
            session = self._session
            session.beat()
            facts = self._facts()
            session.progress.global_step += 1
            session.end_epoch({name: float(value) for name, value in values.items() if name != "epoch"})
            of_all = gather({**values, **facts})
            if of_all is not None:
                session.reporter.send(FunctionReport(tuple(of_all)))
            session.stopping.step()
            if not self._saves and session.stopping.vote():  # no checkpoint is about to follow
                session.stop()

    def _facts(self) -> dict[str, Any]:
        """Return the fields that results have in addition to the reported ones."""
        now = time.time()
        facts = {
            "_training_iteration": self._session.progress.global_step + 1,
            "_timestamp": int(now),
            "_time_this_iter_s": now - self._reported,
            "_time_total_s": now - self._began,
            "_date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now)),
            **_host(),
        }
        self._reported = now
        return facts

    def save(self, state: Mapping[str, Any]) -> None:
        values = checkpoint_values(state, "save_checkpoint({}=...)", MlxError)
        with _calling:
            self._begin("save_checkpoint")
            self.saved.values, self.saved.restored = values, None
            self._session.save_checkpoint(self._session.progress.epoch, {})

    def _agree(self, name: str) -> None:
        """Check that all workers take the same step next; otherwise, they would deadlock."""
        votes = agree([name == call for call in CALLS], self._session.context.topology.device)
        different = [text for text, vote in zip(CALLS.values(), votes, strict=True) if vote is None]
        if different:
            raise MlxError(
                f"some workers {', others '.join(different)}; call report and save_checkpoint on every worker, not "
                "only on rank 0"
            )

    def _begin(self, name: str, epoch: Any = None) -> None:
        """Begin an epoch if the call gives its number, or if the current epoch has had the same call already."""
        self._agree(name)
        progress = self._session.progress
        if epoch is not None and (type(epoch) is not int or epoch < 0):
            raise MlxError(f"{name}(epoch={epoch!r}) is not the number of an epoch; use a whole number from 0")
        if epoch not in (None, progress.epoch) or (epoch is None and name in self._called):
            progress.epoch = progress.epoch + 1 if epoch is None else epoch
            self._saves = not self._called or "save_checkpoint" in self._called
            self._called.clear()
        self._called.add(name)
        progress.epochs = progress.epoch + 1


def _on_cpu(value: Any) -> Any:
    """Return a tensor or model as another process can use it: on the CPU, and without wrappers."""
    value = unwrap(value)
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, nn.Module):
        for module in value.cpu().modules():
            if hasattr(vars(module).get("forward"), "__wrapped__"):  # by `accelerate`
                del module.forward
    return value


@functools.cache
def _host() -> dict[str, Any]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:  # the name is unknown to the network
        address = "127.0.0.1"
    return {"_hostname": name, "_node_ip": address, "_pid": os.getpid()}


class _SavedArguments:
    """The arguments of `save_checkpoint`, as part of a checkpoint; before the first call, `restored`."""

    def __init__(self) -> None:
        self.restored: Mapping[str, Any] | None = None
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restored, self.values = state, dict(state)


def takes_config(function: Callable[..., Any], config: Mapping[str, Any] | None) -> bool:
    """Return True if a function should be called with a config, and False if without an argument.

    Raises:
        TypeError: it takes other arguments.
    """
    for takes in (True, False) if config else (False, True):
        with contextlib.suppress(TypeError):
            inspect.signature(function).bind(*[{}] * takes)
            return takes
    raise TypeError("it takes other arguments")


_running: FunctionExperiment | None = None
"""The run whose function is executed by this process."""

_calling = threading.Lock()
"""Held while workers synchronize, so that calls from other threads do not mix up their collectives."""


def report(metrics: Mapping[str, float | torch.Tensor] | None = None, /, **values: float | torch.Tensor) -> None:
    """Report metrics from a training function, in any of its threads. Every worker must make the same calls.

    The metrics of rank 0 are recorded; `Trainer.run_iterator` and callbacks receive those of all workers. Each call
    counts as an epoch. If a stop was requested, the run stops here, or after the checkpoint of this epoch.

    Args:
        metrics: numbers, or tensors of one element, by name, like `{"loss": 0.3}`. `epoch` sets the number of the
            epoch; by default, epochs are counted from 0.
        values: the same as keywords, like `loss=0.3`.

    Without a Trainer, this does nothing.

    Raises:
        MlxError: called with something that is not a number.
    """
    numbers = {name: _number(name, value) for name, value in {**(metrics or {}), **values}.items()}
    if (run := _run("report")) is not None:
        run.report(numbers)


def save_checkpoint(**state: Any) -> None:
    """Save a checkpoint from a training function: the state of rank 0. Every worker must make the same calls.

    It is stored in the background. Call `report` first, because the best checkpoint is chosen by the reported metrics.
    Without a Trainer, this does nothing.

    Args:
        state: numbers, text, tensors, lists and dicts of these, or objects whose `state_dict` is saved, like
            `epoch=3, model=model`. Arrays of NumPy, JAX and TensorFlow are saved as tensors.

    Raises:
        MlxError: called with a value that a checkpoint cannot contain.
        StorageError: the previous checkpoint could not be written.
    """
    if (run := _run("save_checkpoint")) is not None:
        run.save(state)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the checkpoint that this run resumes from, or the argument `checkpoint` of `Trainer.run`, or None.

    The result has the arguments of `save_checkpoint`. Tensors of a stored checkpoint are on the CPU. Without a Trainer,
    there is none.
    """
    if (run := _run("load_checkpoint")) is None:
        return None
    state = run.saved.values if run.saved.restored is None else run.saved.restored
    return dict(state) or None


def get_dataset_shard(name: str | None = None) -> FunctionShard:
    """Return this worker's rows of a dataset that was passed to `Trainer.run`. Every worker must call this.

        for x, y in get_dataset_shard().iter_torch_batches(batch_size=32): ...

    A training dataset is shuffled in each epoch. `save_checkpoint` saves the position in it, so that a resumed function
    reads the remaining rows of an interrupted pass.

    Args:
        name: name in the dict of datasets; None means the only dataset, or `train`. With folds, `val` has the rows that
            are held out.

    Raises:
        MlxError: there is no such dataset.
        StorageError: its file is missing or has changed.
    """
    run = _run("get_dataset_shard")
    if run is None:
        raise MlxError("get_dataset_shard() works in a function that trainer.run(train_func, dataset=...) has called")
    return run.shard(name)


def accelerate(model: nn.Module) -> nn.Module:
    """Prepare a model for training on all workers. Every worker must call this, with the same models in the same order.

    The model is moved to the device of this worker, gets the settings `precision` and `compile` of the Trainer, and is
    wrapped in DistributedDataParallel if there are several workers. Create the optimizer afterwards. Without a Trainer,
    the model is only moved.

    Raises:
        ConfigError: `compile` has an argument that `torch.compile` does not accept.
    """
    run = _run("accelerate")
    return model.to(device_here()) if run is None else run.accelerate(model)


def world_rank() -> int:
    """Return the rank of this worker among all workers, from 0. Without a Trainer, it is 0."""
    worker = _worker()
    return 0 if worker is None else worker.rank


def world_size() -> int:
    """Return the number of workers. Without a Trainer, it is 1."""
    worker = _worker()
    return 1 if worker is None else worker.world_size


def local_rank() -> int:
    """Return the rank of this worker among those on its machine, from 0. Without a Trainer, it is 0."""
    worker = _worker()
    return 0 if worker is None else worker.local_rank


def _worker() -> Topology | None:
    """Return the position of this process among the workers; None if it is not one."""
    with contextlib.suppress(MlxError):
        return current("world_rank")
    return None


def _run(name: str) -> FunctionExperiment | None:
    """Return the run that has called a function in this process; None in a process that is not a worker."""
    if _running is None and _worker() is not None:
        raise MlxError(f"{name}() works inside a function that Trainer.run has called on a worker")
    return _running


def _number(name: str, value: Any) -> float:
    if not name:
        raise MlxError("report was called with a metric without a name")
    value = as_tensors(value)
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # a tensor with several elements
        number = None
    if not isinstance(number, int | float):
        raise MlxError(f"report({name}={value!r:.60}) is not a number; report numbers, or tensors of one element")
    return int(number) if isinstance(number, bool) else number
