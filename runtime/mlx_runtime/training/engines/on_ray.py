"""The Ray engine: Ray Train places workers on a cluster and replaces lost ones."""

import os
import pickle
import shutil
import tempfile
import threading
import uuid
from typing import Any

import ray.train
import ray.train.torch

from mlx_runtime.distributed.ray_private import TrimmedTrainer
from mlx_runtime.training.engines.base import Handle, StopAsked
from mlx_runtime.training.engines.placement import Cluster
from mlx_runtime.training.failures import Failures, error_of
from mlx_runtime.training.job import Job
from mlx_runtime.training.worker import train

RESIZE_S = 10.0
"""How often an elastic group looks for room for more workers."""

GROUP_START_S = 20
"""How long an elastic group waits for workers to start before it trains with fewer."""


class OnRay:
    """The engine for clusters and for a Ray embedded in the driver. Ray must be running.

    Args:
        cfg: Settings of the run.
        cluster: The cluster to train on.
        timeout_s: Timeout of collectives.
    """

    notice = None

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        self._cfg, self._cluster, self._timeout_s = cfg, cluster, timeout_s

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "_RayGroup":
        scratch = tempfile.mkdtemp(prefix="mlx-ray-")
        return _RayGroup(self._trainer(job, scratch), scratch, self._cfg.max_failures)

    def close(self) -> None:
        pass

    def _trainer(self, job: Job, scratch: str) -> ray.train.torch.TorchTrainer:
        """Return a trainer that only starts and replaces workers; the runtime handles checkpoints."""
        cfg, use_gpu = self._cfg, self._cluster.use_gpu
        smallest, largest = cfg.min_workers or cfg.start_workers, cfg.max_workers or cfg.start_workers
        elastic = smallest != largest
        if elastic:  # a smaller group starts only once Ray has given up on a larger one
            os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_S))
        assert job.address is not None
        return TrimmedTrainer(
            train,
            train_loop_config={"job": pickle.dumps(job)},  # as bytes, or the controller would import what it names
            torch_config=ray.train.torch.TorchConfig(timeout_s=int(self._timeout_s)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=(smallest, largest) if elastic else cfg.start_workers,
                use_gpu=use_gpu,
                resources_per_worker={"CPU": float(cfg.cpus_per_worker)} | ({"GPU": 1.0} if use_gpu else {}),
                **({"elastic_resize_monitor_interval_s": RESIZE_S} if elastic else {}),
            ),
            run_config=ray.train.RunConfig(
                name=uuid.uuid4().hex,  # Ray would look for checkpoints of its own under a known name
                storage_path=scratch,
                logging_config=ray.train.LoggingConfig("INFO" if job.verbose else "CRITICAL"),
                failure_config=ray.train.FailureConfig(max_failures=cfg.max_failures),
                callbacks=[Failures(job.address, job.key)],
            ),
            embedded=self._cluster.embedded,
        )


class _RayGroup:
    """A trainer that runs in a thread, because it would take over Ctrl-C in the main thread."""

    def __init__(self, trainer: ray.train.torch.TorchTrainer, scratch: str, max_failures: int) -> None:
        self._trainer, self._scratch, self._max_failures = trainer, scratch, max_failures
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="fit", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        if self._thread.is_alive():
            return True
        if self._error is not None:
            raise error_of(self._error, self._max_failures) from self._error
        return False

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error
