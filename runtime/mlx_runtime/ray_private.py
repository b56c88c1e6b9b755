"""Everything that relies on private API of Ray 2.60. `tests/runtime/test_ray_private.py` fails when Ray changes it."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import ray
import ray.train
import ray.train.torch
import ray.train.v2._internal.execution.context
import torch.distributed
from ray._private import auto_init_hook
from ray.runtime_context import RuntimeContext
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from mlx_runtime.errors import MlxError


def quiet_ray_train() -> None:
    """Silence Ray Train's notice of every report, and its tracebacks, which the driver reports in its own words."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    reported_by_the_driver = ("ray.train.v2._internal.util", ray.train.v2._internal.execution.context.__file__)
    for name in reported_by_the_driver:  # the latter logs under the name of its file
        logging.getLogger(name).setLevel(logging.CRITICAL)


class TrimmedTrainer(ray.train.torch.TorchTrainer):  # type: ignore[misc]
    """A `TorchTrainer` that starts no processes that the run does not need.

    Args:
        embedded: this process has started Ray, which ends with it. The controller of the workers then runs in this
            process, which has imported what it needs, and no actor waits to free the placement group of a controller
            that was killed. `ray.train.get_all_reported_checkpoints` has no controller to ask in the workers.
        **options: of `TorchTrainer`.
    """

    def __init__(self, *args: Any, embedded: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._embedded = embedded

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = (DatasetsCallback, PlacementGroupCleanerCallback) if self._embedded else DatasetsCallback
        return [item for item in super()._create_default_callbacks() if not isinstance(item, unneeded)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        if not self._embedded:
            return super()._initialize_and_run_controller(**options)
        with _controller_here():
            controller = TrainController(**options)
            asyncio.run(controller.run())
            return controller.get_result()


@contextlib.contextmanager
def _controller_here() -> Iterator[None]:
    """Let a controller work in this process, which is no actor."""
    current_actor = RuntimeContext.current_actor
    RuntimeContext.current_actor = None
    auto_init_hook.enable_auto_connect = False  # where Ray is shut down first, the controller must not start another
    try:
        yield
    finally:
        RuntimeContext.current_actor = current_actor
        auto_init_hook.enable_auto_connect = True


class _ForkedWorker(LocalTrainFnUtils):  # type: ignore[misc]
    """What `ray.train.*` does in a worker of the local engine; collectives go through the process group."""

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **options: Any) -> None:
        if checkpoint is not None:
            raise MlxError("the local engine does not store checkpoints of ray.train.report; use self.save_checkpoint")
        self.barrier()  # Ray's waits for all workers, too
        self._last_metrics = metrics

    def barrier(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        values = [data]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(values, src=0)
        return values[0]


def enter_ray_train(name: str, rank: int, world_size: int) -> None:
    """Make `ray.train.get_context`, `prepare_model` and the like work in this process, without Ray.

    Args:
        name: of the experiment.
        rank, world_size: of this worker; all are on this machine.
    """
    place = {"world_rank": rank, "local_rank": rank, "world_size": world_size, "local_world_size": world_size}
    set_train_fn_utils(_ForkedWorker(experiment_name=name, **place))
    ray.init = _refuse_ray  # also what `ray.get` and others call by themselves when there is no Ray


def _refuse_ray(*_: Any, **__: Any) -> NoReturn:
    raise MlxError("a worker of the local engine has no Ray; train with cfg.engine=ray to use it in worker_loop")
