"""The workers of a run on Ray: actors that are started once Ray has reserved their resources."""

import contextlib
import math
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

from mlx_runtime.companions.ray import autoscaler
from mlx_runtime.companions.ray.reservation import Reservation
from mlx_runtime.companions.ray.worker import RayWorker, Seat
from mlx_runtime.errors import MlxError, full_message, short_message
from mlx_runtime.events import Notice
from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked, backend_of
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.workers.placement import JOB_FLAG, WORKER_FLAG
from mlx_runtime.workers.recovery import RestartingGroup, WorkerDied

RESIZE_S = 10.0
"""Minimum time between two changes of the size of an elastic group."""

START_S = 20.0
"""Time for workers to start, after which Ray is asked whether their resources are still reserved."""

SETTLE_S = 2.0
"""Time to wait for room for more workers than the smallest group has, before it starts."""

STARTS = 3
"""Starts that may fail in a row before workers count as lost: Ray notices the loss of a node late."""

OUTPUT_S = 0.5
"""Time for Ray to forward the last lines of workers."""


@dataclass
class Attempt:
    """The actors of a group from one start to the next: by rank, once they train."""

    workers: list[Any]
    calls: dict[Any, int]  # number of the worker by the reference to its result
    values: dict[int, Any] = field(default_factory=dict)  # results by number
    errors: dict[int, BaseException] = field(default_factory=dict)
    trains: bool = False
    begun: float = field(default_factory=time.monotonic)


class RayGroup(RestartingGroup):
    """The workers of a run. An elastic group is restarted, too, when there is room for more of them."""

    def __init__(
        self, cfg: Any, cluster: Cluster, timeout_s: float, job: Job, handle: Handle, stop_asked: StopAsked
    ) -> None:
        super().__init__(cfg, handle)
        self._stop_asked = stop_asked
        self._title, self._packed = f"{job.run.experiment}/{job.run.name}", pickle.dumps(job)
        self._cluster, self._timeout_s = cluster, timeout_s
        self._resources = {"CPU": float(cfg.cpus_per_worker)}  # of each worker
        self._resources |= {"GPU": cluster.gpus_per_worker} if cluster.use_gpu else {}
        least, most = cfg.elastic.min_workers or cfg.start_workers, cfg.elastic.max_workers or cfg.start_workers
        step = strategy_class(cfg.strategy).multiple_of(cfg)
        self._sizes = (least, most, step) if least == most else (math.ceil(least / step) * step, most, step)
        self._grows = JOB_FLAG in os.environ and autoscaler.room().grows
        self._wait_s = cfg.elastic.wait_s if self._grows else 0.0  # for all workers, at the first start
        self._failed_starts = 0
        self._written_first = [item for item in job.prepared.values() if item.attempt]
        self._start()

    def poll(self) -> bool:
        attempt = self._attempt
        if attempt is None:
            room = self._reservation.strategies()
            if room and self._is_enough(len(room)) and self._reservation.is_held():
                self._begin(room)
            return True
        self._collect(attempt)
        if attempt.errors:
            self._handle_errors(attempt)
        elif attempt.calls:
            if attempt.trains:
                if self._may_grow(attempt):
                    self._kill_workers()
            elif time.monotonic() > attempt.begun + START_S and not self._reservation.is_held():
                self._kill()
                self._start()
        elif attempt.trains:
            return False
        else:
            self._train(attempt)
        return True

    def waits_for(self) -> str | None:
        if self._attempt is not None:
            return None
        try:
            lacking = self._lacking(ray.available_resources())
        except Exception:  # of various types; `poll` reports a lost cluster
            return None
        return f"{lacking}; the autoscaler was asked for them" if lacking and self._grows else lacking or None

    def close(self) -> None:
        if self._attempt is not None and (self._attempt.errors or not self._attempt.calls):
            time.sleep(OUTPUT_S)
        self._kill()

    def _start(self) -> None:
        """Reserve resources; `poll` starts the workers once there is room."""
        self._attempt: Attempt | None = None
        self._reservation = Reservation(self._title, self._resources, *self._sizes)

    def _kill(self) -> None:
        self._kill_workers()
        self._reservation.release()

    def _kill_workers(self) -> None:
        for worker in self._attempt.workers if self._attempt is not None else ():
            with contextlib.suppress(Exception):  # of various types, if the cluster is gone
                ray.kill(worker)
        self._attempt = None

    def _is_enough(self, room: int) -> bool:
        """Return True if workers should not wait for more room."""
        if self._reservation.complete:
            return True
        wait_s = SETTLE_S if room >= self._cfg.start_workers else max(SETTLE_S, self._wait_s)
        return self._reservation.since is not None and time.monotonic() > self._reservation.since + wait_s

    def _may_grow(self, attempt: Attempt) -> bool:
        """Return True if there is room for more workers, and those that train neither prepare nor are about to end."""
        if time.monotonic() < attempt.begun + RESIZE_S or len(attempt.calls) < len(attempt.workers):
            return False
        grows = len(self._reservation.strategies()) > len(attempt.workers)
        if not grows or self._stop_asked() or not self._reservation.is_held():
            return False
        attempt.begun = time.monotonic()  # looks again after `RESIZE_S`
        return all(item.is_written() for item in self._written_first)

    def _begin(self, room: Sequence[Any]) -> None:
        """Start the actors."""
        self._wait_s = 0.0
        kind = ray.remote(num_cpus=self._resources["CPU"], num_gpus=self._resources.get("GPU", 0))(RayWorker)
        workers = [kind.options(scheduling_strategy=strategy).remote() for strategy in room]
        calls = {worker.prepare.remote(self._packed, not number): number for number, worker in enumerate(workers)}
        self._attempt = Attempt(workers, calls)

    def _train(self, attempt: Attempt) -> None:
        """Let the actors train, those on the same machine with consecutive ranks."""
        seats: dict[int, Seat] = attempt.values
        hosts = [*dict.fromkeys(seats[number].host for number in sorted(seats))]
        order = sorted(seats, key=lambda number: (hosts.index(seats[number].host), number))
        workers, calls = [attempt.workers[number] for number in order], {}
        for rank, (worker, number) in enumerate(zip(workers, order, strict=True)):
            here = [rank for rank, other in enumerate(order) if seats[other].host == seats[number].host]
            variables: dict[str, Any] = {  # as in torchrun
                "RANK": rank,
                "LOCAL_RANK": here.index(rank),
                "NODE_RANK": hosts.index(seats[number].host),
                "GROUP_RANK": hosts.index(seats[number].host),
                "WORLD_SIZE": len(order),
                "LOCAL_WORLD_SIZE": len(here),
                "MASTER_ADDR": seats[0].host,
                "MASTER_PORT": seats[0].port,
                WORKER_FLAG: "1",
            }
            if not self._cluster.use_gpu:
                variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides only those of workers that it assigns others
            gpus = [gpu for rank in here for gpu in seats[order[rank]].gpus]
            if len(seats[number].gpus) == 1 and len({*gpus}) == len(gpus):  # then NCCL can copy between them directly
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            call = worker.train.remote(
                rank,
                {name: str(value) for name, value in variables.items()},
                world_size=len(order),
                backend=backend_of(use_gpu=self._cluster.use_gpu),
                timeout_s=self._timeout_s,
                first_rank=here[0],
            )
            calls[call] = rank
        self._failed_starts = 0
        self._attempt = Attempt(workers, calls, trains=True)

    def _collect(self, attempt: Attempt) -> None:
        """Take the results of calls that have ended."""
        done, _ = ray.wait([*attempt.calls], num_returns=len(attempt.calls), timeout=0) if attempt.calls else ([], [])
        for reference in done:
            number = attempt.calls.pop(reference)
            try:
                value = ray.get(reference)
            except RayError as error:
                attempt.errors[number] = failure_of(number, error)
                continue
            attempt.values[number] = value
            if attempt.trains and (failed := pickle.loads(value)) is not None:
                attempt.errors[number] = failed

    def _handle_errors(self, attempt: Attempt) -> None:
        replaceable = all(isinstance(error, WorkerDied) for error in attempt.errors.values())
        if attempt.trains or not replaceable or self._failed_starts == STARTS:
            self.handle_failure(attempt.errors, all_ended=not attempt.calls)
        else:
            self._failed_starts += 1
            self._handle(Notice(f"starting  workers again: {short_message(next(iter(attempt.errors.values())))}"))
            self._kill()
            self._start()

    def _lacking(self, free: Mapping[str, float]) -> str:
        """Describe the resources that the smallest group lacks, or the workers until a smaller group begins."""
        workers, wanted = self._sizes[0], self._cfg.start_workers
        if self._reservation.since is not None:
            fit = len(self._reservation.strategies())
            waits = self._wait_s and fit < wanted
            return f"{wanted} workers, room for {fit}; begins with fewer after {self._wait_s:g} s" if waits else ""
        needed = {name: amount * workers for name, amount in self._resources.items()}
        missing = [name for name, amount in needed.items() if amount > free.get(name, 0)]
        if not missing:  # the cluster has enough CPUs in total, but no node has
            return f"{self._cfg.cpus_per_worker} CPUs on one node"
        return ", ".join(f"{needed[name]:g} {name}s, {free.get(name, 0):g} free" for name in missing)


def failure_of(rank: int, error: RayError) -> MlxError | WorkerDied:
    """Return the error for a worker whose call has failed: a `WorkerDied` if it may be replaced."""
    if not isinstance(error, RayTaskError | RuntimeEnvSetupError):
        return WorkerDied(short_message(error))
    cause = getattr(error, "cause", None) or error  # it would fail again
    lines = [line for line in full_message(cause).splitlines() if line.strip()]
    why = short_message(cause) if len(lines) < 2 else f"{short_message(cause)} {lines[-1].strip()}"
    return MlxError(f"rank {rank} failed on Ray: {type(cause).__name__}: {why}")
