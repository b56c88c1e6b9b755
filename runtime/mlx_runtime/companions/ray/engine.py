"""The Ray engine: Ray Train places workers on a cluster and replaces lost ones.

Methods import Ray when they need it, because `launch` only calls `refusal`, and must be quick.
"""

import os
import pickle
import threading
import uuid
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.settings import environment
from mlx_runtime.training.engines import JOB_FLAG, Cluster, Handle, Job, Scratch, StopAsked, backend_of

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

RESIZE_S = 10.0
"""Interval at which an elastic group checks for room for more workers."""

GROUP_START_S = 20
"""Maximum time for workers to start before an elastic group trains with fewer."""


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
        self._scratch: Scratch | None = None  # until a run starts
        self._error: BaseException | None = None

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "OnRay":
        self._error, self._scratch = None, Scratch("mlx-ray-")
        # In the main thread, Ray Train would take over Ctrl-C.
        self._thread = threading.Thread(target=self._fit, args=(self._trainer(job),), name="fit", daemon=True)
        self._thread.start()
        return self

    def poll(self) -> bool:
        if self._thread.is_alive():
            return True
        if self._error is not None:
            from mlx_runtime.companions.ray.failures import error_of

            raise error_of(self._error, self._cfg) from self._error
        return False

    def waits_for(self) -> str | None:
        import ray

        from mlx_runtime.companions.ray.private import placement_states

        try:
            placed, free = placement_states(), ray.available_resources()
        except Exception:  # of various types; `poll` reports a lost cluster
            return None
        if "CREATED" in placed:
            return None
        workers = self._sizes[0]
        needed = {name: amount * workers for name, amount in self._resources.items()}
        missing = [name for name, amount in needed.items() if amount > free.get(name, 0)]
        if not missing and "PENDING" in placed:  # the cluster has enough CPUs in total, but no node has
            return f"{self._cfg.cpus_per_worker} CPUs on one node"
        return ", ".join(f"{needed[name]:g} {name}s, {free.get(name, 0):g} free" for name in missing) or None

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def _fit(self, trainer: "TorchTrainer") -> None:
        # A smaller group starts only after Ray has given up on a larger one.
        variables = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(GROUP_START_S)} if self._elastic else {}
        try:
            with environment(variables):
                trainer.fit()
        except BaseException as error:
            self._error = error

    def _trainer(self, job: Job) -> "TorchTrainer":
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
        )
