"""The private API of Ray 2.60. `test_private.py` fails when Ray changes it.

That of Ray Train is in `private_train`, which takes a second to import.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from mlx_runtime.errors import MlxError

if TYPE_CHECKING:
    from mlx_runtime.distributed.topology import Topology

try:
    from ray._private.node import Node
    from ray._private.state import state
except ImportError as error:
    raise MlxError(
        f'Ray {ray.__version__} lacks a part of the private API of Ray 2.60: {error}; type: pip install "ray==2.60.*"'
    ) from error


@contextlib.contextmanager
def bare_head() -> Iterator[None]:
    """Let `ray.init` start no server for a dashboard, as it does even without a dashboard, and no autoscaler."""
    kept = {name: getattr(Node, name) for name in ("start_api_server", "start_monitor")}
    for name in kept:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


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


def is_draining() -> bool:
    """Return True if the node of this process is about to be preempted."""
    return ray.get_runtime_context().get_node_id() in state.get_draining_nodes()


def enter_ray_train(name: str, topology: "Topology | None", *, quiet: bool) -> None:
    """Make `ray.train.get_context`, `prepare_model` and the like work in this process. Imports `ray.train`.

    This process is a worker, or if `topology` is None, the driver and only process of a run. `name` is the name of the
    experiment.
    """
    functions = _train()
    functions.enter(name, topology)
    if quiet:
        functions.quiet()


def call_functions(functions: Any) -> None:
    """Let `ray.train.report` and others call those of a training function, until the next `enter_ray_train`."""
    _train().WorkerFunctions.functions = functions


def keep_sharded_models() -> None:
    """Make `ray.train.torch.prepare_model` return sharded models unchanged."""
    _train().keep_sharded_models()


def _train() -> Any:
    """Import `private_train`. If this is called by `after_import`, `ray` does not have the module as attribute yet."""
    if "ray.train" in sys.modules:
        ray.train = sys.modules["ray.train"]
    from mlx_runtime.companions.ray import private_train

    return private_train


def refuse_ray() -> None:
    """Make `ray.get` and others, which start Ray if it is not running, raise an error in this process."""
    ray.init = _refuse_ray


def _refuse_ray(*_: Any, **__: Any) -> NoReturn:
    raise MlxError("a worker of the local engine has no Ray; train with cfg.engine=ray to use it in worker_loop")
