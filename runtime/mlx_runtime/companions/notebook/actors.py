"""Objects of a user's class, one on each worker: actors of Ray in one placement group."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ClusterError, MlxError, UsageError, WorkerLostError, short_message
from mlx_runtime.importing import add_to_path
from mlx_runtime.loop.job import backend_of
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.workers.placement import WORKER_FLAG
from mlx_runtime.workers.worker import loop_errors

ROOM_S = 60
"""Time to wait for room on a cluster."""

GRACE_S = 5
"""Time that the other workers have to finish a call that failed on one of them, before all are shut down."""


class Rendezvous(NamedTuple):
    """Position of a worker in its group, and the address of the store for its rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int


class Actors:
    """One object per worker, until `close`. Starts Ray unless it runs already.

    Raises:
        ConfigError, ClusterError: there is no room for the workers, or Ray does not start.
        WorkerLoopError: the constructor of the class raised an exception.
    """

    def __init__(self, cfg: TrainConfig, cls: type, args: Any, kwargs: Any) -> None:
        self.closed = False
        self._stack = contextlib.ExitStack()
        size, project = cfg.start_workers, Path.cwd()
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            use_gpu = self._stack.enter_context(on_ray(cfg)).use_gpu
            resources = {"CPU": cfg.cpus_per_worker, **({"GPU": cfg.gpus_per_worker} if use_gpu else {})}
            group = placement_group([resources] * size)
            self._stack.callback(remove_placement_group, group)  # with its actors
            if not group.wait(ROOM_S):
                raise ClusterError(f"Ray has not found room for {size} workers with {resources} each within {ROOM_S} s")
            options: dict[str, Any] = {"num_cpus": cfg.cpus_per_worker, "num_gpus": cfg.gpus_per_worker * use_gpu}
            self._workers = []
            for rank in range(size):
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
                self._workers.append(ray.remote(ActorWorker).options(**options).remote(project))
            addresses = self._results([worker.address.remote(not rank) for rank, worker in enumerate(self._workers)])
            hosts = [host for host, _ in addresses]
            calls = []
            for rank, worker in enumerate(self._workers):
                rendezvous = Rendezvous(rank, size, hosts[:rank].count(hosts[rank]), *addresses[0])
                backend = backend_of(use_gpu=use_gpu)
                calls.append(worker.create.remote(rendezvous, backend, cfg.cpus_per_worker, cls, args, kwargs))
            self._results(calls)
            failed.pop_all()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, *, single: bool = False) -> list[Any]:
        """Call a function with each object, or only that of rank 0, and return the values by rank."""
        if not callable(function):
            raise UsageError(f"{function!r:.60} is not a function; write one that takes the object: lambda w: w.step()")
        workers = self._workers[:1] if single else self._workers
        return self._results([worker.call.remote(function, args, kwargs) for worker in workers])

    def close(self) -> None:
        self.closed = True
        self._stack.close()

    def _results(self, calls: list[Any]) -> list[Any]:
        """Wait for calls to actors. If one fails, raise its error, and shut all down if others are stuck."""
        left = list(calls)
        try:
            while left:
                (done,), left = ray.wait(left)
                ray.get(done)
            return list(ray.get(calls))
        except ray.exceptions.RayTaskError as error:
            if left and ray.wait(left, num_returns=len(left), timeout=GRACE_S)[1]:
                self.close()
            if isinstance(error.cause, MlxError):
                raise error.cause from None
            why = f"{type(error.cause).__name__}: {short_message(error.cause)}"
            raise MlxError(f"a worker could not read the call or return its value: {why}") from error
        except ray.exceptions.RayError as error:
            self.close()
            raise WorkerLostError(f"a worker was lost: {short_message(error)}") from error
        except BaseException:  # Ctrl-C
            self.close()
            raise


class ActorWorker:
    """An actor that holds the object of one worker."""

    def __init__(self, project: Path) -> None:
        self._project = project if project.is_dir() else Path.cwd()  # Ray unpacks it in the working directory
        self._store: Any = None
        self._entered = contextlib.ExitStack()  # until this process ends
        add_to_path(self._project)

    def address(self, serves: bool) -> tuple[str, int]:
        """Return the address of this node, and the port of the group's store if this worker serves it, otherwise 0."""
        host = ray.util.get_node_ip_address()
        if serves:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port if serves else 0

    def create(self, rendezvous: Rendezvous, backend: str, threads: int, cls: type, args: Any, kwargs: Any) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # as in torchrun
        os.environ.update(zip(names, map(str, rendezvous), strict=True), **{WORKER_FLAG: "1"})
        torch.set_num_threads(threads)
        device = torch.device("cpu" if backend == "gloo" else "cuda")  # Ray shows each actor its own GPUs
        topology = Topology(rendezvous.rank, rendezvous.world_size, device, rendezvous.local_rank)
        self._entered.enter_context(topology.entered())
        self._rank = rendezvous.rank
        with loop_errors(self._rank, self._project):
            self._store = self._store or TCPStore(rendezvous.host, rendezvous.port)
            torch.distributed.init_process_group(
                backend,
                store=self._store,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                device_id=None if device.type == "cpu" else torch.device("cuda", 0),
            )
            self._object = cls(*args, **kwargs)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with loop_errors(self._rank, self._project):
            return function(self._object, *args, **kwargs)
