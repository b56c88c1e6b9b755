"""Training functions: the experiment whose loop calls one, and the functions that it may call."""

import base64
import contextlib
import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mlx_runtime.companions.notebook import scripts
from mlx_runtime.companions.notebook.arrays import as_tensors
from mlx_runtime.companions.notebook.backends import with_backend
from mlx_runtime.data import DatasetShards
from mlx_runtime.distributed import agree, current, unwrap
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.events import FunctionReturned
from mlx_runtime.runs.checkpoints import plain_entries
from mlx_runtime.training import TrainConfig
from mlx_runtime.training.loop import BaseModule

CALLS = {"report": "call report", "save_checkpoint": "call save_checkpoint", "return": "return from the function"}
"""Steps that all workers must take together, in words for errors."""


@dataclass
class FunctionConfig(TrainConfig):
    """Settings of a run that calls a function.

    Attributes:
        function: import path of the function, like `src.training.train_func`.
        source: source of its module, if it was defined in a cell or an interactive session.
        backend: how workers are connected, besides torch: `jax`, `tensorflow`, or the import path of a class.
        config: its argument.
        checkpoint: returned by `load_checkpoint` until the run has its own checkpoint.
        num_epochs: not used; the function determines the end.
    """

    function: str = ""
    source: str = ""
    backend: str = "torch"
    config: dict[str, Any] = field(default_factory=dict, metadata={"resumable": True})
    checkpoint: dict[str, Any] | None = None
    num_epochs: int = 0


def load_function(cfg: TrainConfig) -> Callable[..., Any] | None:
    """Import the function of a run in this process; None for the settings of other runs.

    Raises:
        ConfigError: it is not there.
    """
    function: Callable[..., Any] | None = (
        scripts.load(cfg.function, cfg.source) if isinstance(cfg, FunctionConfig) else None
    )
    return function


class FunctionExperiment(BaseModule):
    """The experiment that `Trainer.run` trains: its loop calls `cfg.function` on every worker."""

    def __init__(self, cfg: FunctionConfig) -> None:
        super().__init__(cfg=cfg)
        self.saved = _SavedArguments(cfg.checkpoint)
        self._called: set[str] = set()  # calls of `report` and `save_checkpoint` in this epoch
        self._saves = True  # each epoch is expected to have a checkpoint, until one has none

    @with_backend
    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        global _running
        path = self.cfg.function
        function = scripts.load(path, self.cfg.source)
        _running = self
        try:
            value = function(self.cfg.config) if takes_config(function, self.cfg.config) else function()
            self._agree("return")
        finally:
            _running = None
        rank, world_size = self._session.context.topology.rank, self._session.context.topology.world_size
        try:
            pickled = base64.b64encode(pickle.dumps(value)).decode()
        except Exception as error:  # pickling can raise anything
            raise MlxError(
                f"{path} returned a {type(value).__name__} on rank {rank} that cannot be pickled: "
                f"{short_message(error)}. Return numbers, text, tensors or a state_dict"
            ) from None
        self._session.send(FunctionReturned(rank, world_size, pickled))

    def report(self, metrics: Mapping[str, Any]) -> None:
        values = {name: _number(name, value) for name, value in metrics.items()}
        with _calling:
            self._begin("report", values.get("epoch"))
            self._session.report(values, may_stop=not self._saves)

    def save(self, state: Mapping[str, Any]) -> None:
        given = {name: unwrap(item) for name, item in state.items()}
        given = {name: item.state_dict() if hasattr(item, "state_dict") else item for name, item in given.items()}
        values, unsafe = plain_entries(as_tensors(given))
        if unsafe:
            kind = type(given[unsafe[0]]).__name__
            raise MlxError(
                f"save_checkpoint({unsafe[0]}=...) is of type {kind}, which a checkpoint cannot hold; it takes "
                "numbers, text, tensors, arrays, lists and dicts of these, and objects with a state_dict"
            )
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


class _SavedArguments:
    """The arguments of `save_checkpoint`, as part of a checkpoint; before the first call, `restored`."""

    def __init__(self, restored: Mapping[str, Any] | None) -> None:
        self.restored, self.values = restored, dict[str, Any]()

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


def report(**metrics: float | torch.Tensor) -> None:
    """Report metrics from a training function, in any of its threads. Every worker must make the same calls.

    The metrics of rank 0 are recorded; `Trainer.run_iterator` and callbacks receive those of all workers. Each call
    counts as an epoch. If a stop was requested, the run stops here, or after the checkpoint of this epoch.

    Args:
        metrics: numbers, or tensors of one element, like `loss=0.3`. `epoch` sets the number of the epoch; by default,
            epochs are counted from 0.

    Raises:
        MlxError: called outside of a run, or with something that is not a number.
    """
    _run("report").report(metrics)


def save_checkpoint(**state: Any) -> None:
    """Save a checkpoint from a training function: the state of rank 0. Every worker must make the same calls.

    It is stored in the background. Call `report` first, because the best checkpoint is chosen by the reported metrics.

    Args:
        state: numbers, text, tensors, lists and dicts of these, or objects whose `state_dict` is saved, like
            `epoch=3, model=model`. Arrays of NumPy, JAX and TensorFlow are saved as tensors.

    Raises:
        MlxError: called outside of a run, or with a value that a checkpoint cannot contain.
        StorageError: the previous checkpoint could not be written.
    """
    _run("save_checkpoint").save(state)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the checkpoint that this run resumes from, or the argument `checkpoint` of `Trainer.run`, or None.

    The result has the arguments of `save_checkpoint`. Tensors of a stored checkpoint are on the CPU.

    Raises:
        MlxError: called outside of a run.
    """
    saved = _run("load_checkpoint").saved
    state = saved.values if saved.restored is None else saved.restored
    return dict(state) or None


def world_rank() -> int:
    """Return the rank of this worker among all workers, from 0.

    Raises:
        MlxError: called outside of a worker.
    """
    return current("world_rank").rank


def world_size() -> int:
    """Return the number of workers.

    Raises:
        MlxError: called outside of a worker.
    """
    return current("world_size").world_size


def local_rank() -> int:
    """Return the rank of this worker among those on its machine, from 0.

    Raises:
        MlxError: called outside of a worker.
    """
    return current("local_rank").local_rank


def _run(name: str) -> FunctionExperiment:
    if _running is None:
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
