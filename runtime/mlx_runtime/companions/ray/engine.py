"""The Ray engine: Ray Train places workers on a cluster and replaces lost ones.

Methods import Ray when they need it, because `launch` only calls `refusal`, and must be quick.
"""

import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.ray import autoscaler
from mlx_runtime.companions.ray.jobs import run_titles
from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.settings import environment
from mlx_runtime.training.engines import JOB_FLAG, Cluster, Handle, Job, Scratch, StopAsked, backend_of

if TYPE_CHECKING:
    from mlx_runtime.companions.ray.private import TrimmedTrainer

RESIZE_S = 10.0
"""Interval at which an elastic group checks for room for more workers."""

GROUP_START_S = 20
"""Maximum time for workers to start before an elastic group trains with fewer."""

END_S = 20.0
"""Maximum time for Ray Train to end when a run ends early."""


class OnRay:
    """The engine for clusters and for Ray embedded in the driver, and its group. Ray must be running."""

    notice = None

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> None:
        return None

    @staticmethod
    def connect(cfg: Any, why: str) -> AbstractContextManager[Cluster]:
        return on_ray(cfg, why)

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        self._cfg, self._cluster, self._timeout_s = cfg, cluster, timeout_s
        self._sizes = cfg.elastic.min_workers or cfg.start_workers, cfg.elastic.max_workers or cfg.start_workers
        self._elastic = self._sizes[0] != self._sizes[1]
        self._resources = {"CPU": float(cfg.cpus_per_worker)}  # of each worker
        self._resources |= {"GPU": cluster.gpus_per_worker} if cluster.use_gpu else {}
        self._scratch: Scratch | None = None  # until a run starts, like the next two
        self._trainer: TrimmedTrainer | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._titles: dict[str, str] = {}  # of runs, by Ray's id of their jobs

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "OnRay":
        self._error, self._scratch = None, Scratch("mlx-ray-")
        self._started, self._grows = time.monotonic(), JOB_FLAG in os.environ and autoscaler.room().grows
        self._wait_s = self._cfg.elastic.wait_s if self._elastic and self._grows else 0.0
        self._trainer = self._make_trainer(job)
        # In the main thread, Ray Train would take over Ctrl-C.
        self._thread = threading.Thread(target=self._fit, args=(self._trainer,), name="fit", daemon=True)
        self._thread.start()
        return self

    def poll(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._error is not None:
            from mlx_runtime.companions.ray.failures import error_of

            raise error_of(self._error, self._cfg) from self._error
        return False

    def waits_for(self) -> str | None:
        import ray

        from mlx_runtime.companions.ray.private import placements

        try:
            groups, free = placements(), ray.available_resources()
            job = ray.get_runtime_context().get_job_id()
            placed = {state for owner, state, _ in groups if owner == job}
            if "CREATED" in placed or not (lacking := self._lacking(free, placed)):
                return None
            doing = autoscaler.activity() or "was asked for them" if self._grows else None
            others = self._others([(owner, state, held) for owner, state, held in groups if owner != job])
        except Exception:  # of various types; `poll` reports a lost cluster
            return None
        return "; ".join([lacking, *others, *([f"the autoscaler {doing}"] if doing else [])])

    def _lacking(self, free: Mapping[str, float], placed: set[str]) -> str:
        """Describe the resources that the smallest group lacks, or the workers until a smaller group begins."""
        workers, wanted = self._sizes[0], self._cfg.start_workers
        needed = {name: amount * workers for name, amount in self._resources.items()}
        missing = [name for name, amount in needed.items() if amount > free.get(name, 0)]
        if not missing and "PENDING" in placed:  # the cluster has enough CPUs in total, but no node has
            return f"{self._cfg.cpus_per_worker} CPUs on one node"
        fit = min(int(free.get(name, 0) / amount) for name, amount in self._resources.items())
        if not missing and fit < wanted and time.monotonic() < self._started + self._wait_s:
            return f"{wanted} workers, room for {fit}; begins with fewer after {self._wait_s:g} s"
        return ", ".join(f"{needed[name]:g} {name}s, {free.get(name, 0):g} free" for name in missing)

    def _others(self, groups: Sequence[tuple[str, str, Mapping[str, float]]]) -> Iterator[str]:
        """Yield the shares of other jobs in the needed resources, and the jobs that also wait."""
        owners = {owner for owner, state, _ in groups if state in ("CREATED", "PENDING")}
        if owners - self._titles.keys():
            self._titles = dict.fromkeys(owners, "another job") | run_titles()
        for owner in sorted(owners):
            mine = [(state, held) for other, state, held in groups if other == owner]
            for name in self._resources:
                if amount := sum(held.get(name, 0) for state, held in mine if state == "CREATED"):
                    yield f"{self._titles[owner]} holds {amount:g} {name}s"
            if any(state == "PENDING" for state, _ in mine):
                yield f"{self._titles[owner]} also waits"

    def close(self) -> None:
        if self._trainer is not None and self._thread is not None and self._thread.is_alive():
            self._trainer.abandon()
            self._thread.join(END_S)
        if self._scratch is not None:
            self._scratch.close()

    def _fit(self, trainer: "TrimmedTrainer") -> None:
        # A smaller group starts only after Ray has given up on a larger one.
        variables = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(GROUP_START_S)} if self._elastic else {}
        try:
            with environment(variables):
                trainer.fit()
        except BaseException as error:
            self._error = error

    def _make_trainer(self, job: Job) -> "TrimmedTrainer":
        """Return a trainer that only starts and replaces workers; the runtime handles checkpoints."""
        import ray.train.torch

        from mlx_runtime.companions.ray.failures import Failures
        from mlx_runtime.companions.ray.private import OwnGPUs, TrimmedTrainer
        from mlx_runtime.companions.ray.worker import train
        from mlx_runtime.training.strategies import strategy_class

        assert self._scratch is not None, "a run has started"
        cfg, use_gpu = self._cfg, self._cluster.use_gpu
        torch_config = OwnGPUs if self._cluster.gpus_per_worker > 1 else ray.train.torch.TorchConfig
        return TrimmedTrainer(
            train,
            train_loop_config={"job": pickle.dumps(job)},  # as bytes, so that the controller need not import it
            torch_config=torch_config(backend_of(use_gpu=use_gpu), timeout_s=int(self._timeout_s)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=self._sizes if self._elastic else cfg.start_workers,
                use_gpu=use_gpu,
                resources_per_worker=self._resources,
                **({"elastic_resize_monitor_interval_s": RESIZE_S} if self._elastic else {}),
            ),
            run_config=ray.train.RunConfig(
                name=uuid.uuid4().hex,  # unique, because Ray would search a known name for its own checkpoints
                storage_path=str(self._scratch.path),
                logging_config=ray.train.LoggingConfig("INFO" if job.verbose else "CRITICAL"),
                failure_config=ray.train.FailureConfig(max_failures=cfg.elastic.max_failures),
                callbacks=[Failures(*job.receiver)],
            ),
            embedded=os.environ.get(JOB_FLAG) != "1",
            multiple_of=strategy_class(cfg.strategy).multiple_of(cfg),
            patience=(cfg.start_workers, self._wait_s),
        )
