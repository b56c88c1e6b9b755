"""All uses of the private API of Ray 2.60. `test_private.py` fails when Ray changes it."""

import asyncio
import contextlib
import functools
import logging
import pickle
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import ray
import ray.train
import ray.train.torch
import ray.tune  # early, because Ray Train would import it within a loop, and that draws from `random`
import ray.util
import torch.distributed
from ray.runtime_context import RuntimeContext
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.distributed import Topology, broadcast, current, is_sharded
from mlx_runtime.errors import MlxError

try:
    import ray.train.v2._internal.execution.context
    from ray._private import auto_init_hook
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.constants import get_env_vars_to_propagate
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import (
        ElasticScalingPolicy,
        NoopDecision,
        ResizeDecision,
        ScalingDecision,
    )
    from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
        TrainAutoscalingCoordinatorClient,
    )
    from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
    from ray.train.v2.torch import train_loop_utils
except ImportError as error:
    raise MlxError(
        f'Ray {ray.__version__} lacks a part of the private API of Ray 2.60: {error}; type: pip install "ray==2.60.*"'
    ) from error


def quiet_ray_train() -> None:
    """Silence Ray Train's message about each report, and its tracebacks of errors that the driver prints."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    reported_by_the_driver = ("ray.train.v2._internal.util", ray.train.v2._internal.execution.context.__file__)
    for name in reported_by_the_driver:  # the second logger is named after its file
        logging.getLogger(name).setLevel(logging.CRITICAL)


def serialize_lineage(dataset: Any) -> bytes:
    """Return the steps of a Dataset of Ray Data for other clusters.

    `Dataset.serialize_lineage` alone keeps references to objects of this cluster, such as the paths of CSV files.
    """
    reducers = ray.cloudpickle.CloudPickler.dispatch
    by_reference = reducers[ray.ObjectRef]
    reducers[ray.ObjectRef] = lambda reference: (ray.put, (ray.get(reference),))
    try:
        steps: bytes = dataset.serialize_lineage()
    finally:
        reducers[ray.ObjectRef] = by_reference
    return steps


class TrimmedTrainer(ray.train.torch.TorchTrainer):  # type: ignore[misc]
    """A `TorchTrainer` that starts only the processes that the run needs.

    If Ray is `embedded`, it was started by this process and ends with it. The controller of the workers then runs in
    this process, which has already imported its libraries, and no actor waits to free the placement group of a killed
    controller. `ray.train.get_all_reported_checkpoints` does not work in the workers. `multiple_of` and `patience` are
    those of `SizePolicy`.
    """

    def __init__(
        self,
        *args: Any,
        embedded: bool,
        multiple_of: int = 1,
        patience: tuple[int, float] = (0, 0.0),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._embedded, self._multiple_of, self._patience = embedded, multiple_of, patience
        self._end: Callable[[], object] | None = None  # ends the controller, once it runs
        self._abandoned = False

    def abandon(self) -> None:
        """End `fit` in another thread, without its workers. `ray.shutdown` would free memory that it still uses."""
        self._abandoned = True
        if self._end is not None:
            self._end()

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = (DatasetsCallback, PlacementGroupCleanerCallback) if self._embedded else DatasetsCallback
        return [item for item in super()._create_default_callbacks() if not isinstance(item, unneeded)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        special = self._multiple_of > 1 or self._patience[1] > 0
        if special and self.scaling_config.elasticity_enabled:
            options["scaling_policy"] = SizePolicy(self.scaling_config, self._multiple_of, self._patience)
        if not self._embedded:
            return self._run_actor(options)
        with controller_here():
            controller = TrainController(**options)
            asyncio.run(self._until_abandoned(controller.run()))
            return controller.get_result()

    async def _until_abandoned(self, run: Coroutine[Any, Any, None]) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(run)
        self._end = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._abandoned:
            task.cancel()
        await task

    def _run_actor(self, options: dict[str, Any]) -> Any:
        """Run the controller as an actor beside the driver, as the overridden method does, but keep its handle."""
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        variables = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        kind = ray.remote(num_cpus=0, label_selector=here, runtime_env={"env_vars": variables})(TrainController)
        controller = kind.remote(**options)
        self._end = functools.partial(self._kill, controller)
        if self._abandoned:
            self._kill(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())

    def _kill(self, controller: Any) -> None:
        """Kill the controller, which may be waiting for room, and withdraw its request, which would outlive it."""
        ray.kill(controller)
        TrainAutoscalingCoordinatorClient(f"train-{self.train_run_context.run_id}").cancel_resource_request()


class OwnGPUs(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """Shows each worker only its own GPUs, instead of those of all workers on its node."""

    @property
    def backend_cls(self) -> Any:
        return type("OwnGPUsBackend", (super().backend_cls,), {"share_cuda_visible_devices": False})


class SizePolicy(ElasticScalingPolicy):  # type: ignore[misc]
    """A policy that resizes elastic groups by whole replicas of the models, in multiples of `multiple_of` workers.

    The first group has fewer than `patience[0]` workers only if there is no room for them within `patience[1]` seconds.
    """

    def __init__(self, scaling_config: ray.train.ScalingConfig, multiple_of: int, patience: tuple[int, float]) -> None:
        super().__init__(scaling_config)
        self._multiple_of = multiple_of
        self._wanted, self._wait_s = patience
        self._since: float | None = None  # when the controller, perhaps in another process, asked first

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._since = self._since or time.monotonic()
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            if decision.num_workers < self._wanted and time.monotonic() < self._since + self._wait_s:
                return NoopDecision()
            self._wanted = 0
        return decision

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible: int = super()._count_possible_workers(reserved_resources)
        return possible - possible % self._multiple_of


def placements() -> list[tuple[str, str, dict[str, float]]]:
    """Return job, state (PENDING, CREATED, …) and resources of each placement group. Their ids end with the job's."""
    found = []
    for name, facts in ray.util.placement_group_table().items():
        total: dict[str, float] = {}
        for bundle in facts["bundles"].values():
            total |= {key: total.get(key, 0) + amount for key, amount in bundle.items()}
        found.append((name[-len(ray.get_runtime_context().get_job_id()) :], facts["state"], total))
    return found


@contextlib.contextmanager
def controller_here() -> Iterator[None]:
    """Let a controller run in this process, which is not an actor."""
    current_actor = RuntimeContext.current_actor
    RuntimeContext.current_actor = None
    auto_init_hook.enable_auto_connect = False  # the controller must not restart Ray after its shutdown
    try:
        yield
    finally:
        RuntimeContext.current_actor = current_actor
        auto_init_hook.enable_auto_connect = True


class ForkedWorker(LocalTrainFnUtils):  # type: ignore[misc]
    """Implementation of `ray.train.*` in a worker of the local engine; collectives use the process group."""

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **options: Any) -> None:
        if checkpoint is not None:
            raise MlxError("the local engine does not store checkpoints of ray.train.report; use self.save_checkpoint")
        self.barrier()  # as Ray's own `report` does
        self._last_metrics = metrics

    def barrier(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        # Data of any type is safe, because the workers have proved that they belong to the run.
        return pickle.loads(broadcast(pickle.dumps(data)))


def enter_ray_train(name: str, topology: Topology | None) -> None:
    """Make `ray.train.get_context`, `prepare_model` and the like work in this process.

    This process is a worker of the local engine, without Ray, or if `topology` is None, the driver and only process of
    a run. `name` is the name of the experiment.
    """
    if topology is None:
        set_train_fn_utils(LocalTrainFnUtils(experiment_name=name))
        return
    rank, world_size = topology.rank, topology.world_size
    ranks = {"world_rank": rank, "local_rank": rank, "world_size": world_size, "local_world_size": world_size}
    set_train_fn_utils(ForkedWorker(experiment_name=name, **ranks))
    ray.init = _refuse_ray  # called by `ray.get` and others if Ray is not running


def _refuse_ray(*_: Any, **__: Any) -> NoReturn:
    raise MlxError("a worker of the local engine has no Ray; train with cfg.engine=ray to use it in worker_loop")


def keep_sharded_models() -> None:
    """Make `ray.train.torch.prepare_model` return sharded models, and those cut into stages, unchanged.

    It looks up the replaced name at each call, so user code may already have imported `prepare_model`.
    """
    train_loop_utils.DistributedDataParallel = _replicate


@functools.wraps(DistributedDataParallel, updated=())  # Ray logs the name
def _replicate(model: nn.Module, **options: Any) -> nn.Module:
    kept = is_sharded(model) or current("prepare_model").model_parallel_size > 1
    return model if kept else current("prepare_model").replicate(model, **options)
