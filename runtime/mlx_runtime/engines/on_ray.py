"""Workers that Ray Train places on a cluster, and replaces there."""

import os
import pickle
import shutil
import tempfile
import threading
import uuid
from typing import Any

import ray.train
import ray.train.torch

from mlx_runtime.cluster import Cluster
from mlx_runtime.engines.base import Handle, StopAsked
from mlx_runtime.failures import Failures, error_of
from mlx_runtime.ray_private import TrimmedTrainer
from mlx_runtime.training import Job, train

RESIZE_S = 10.0
"""How often an elastic group looks for room for more workers."""

GROUP_START_S = 20
"""How long an elastic group waits for workers that do not start, before it trains with fewer."""


class OnRay:
    """The engine of clusters, and of a Ray that is embedded here. Ray must have been started.

    Args:
        cfg: of the run.
        cluster: that it trains on.
        timeout_s: of collectives.
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
        """Checkpoints are ours: Ray Train has only to start workers, and to replace lost ones."""
        cfg, cluster = self._cfg, self._cluster
        least, most = cfg.min_workers or cfg.start_workers, cfg.max_workers or cfg.start_workers
        if least != most:  # a smaller group starts only once Ray has given up on the larger one
            os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_S))
        resources = {"CPU": float(cfg.cpus_per_worker)} | ({"GPU": 1.0} if cluster.use_gpu else {})
        assert job.address is not None
        return TrimmedTrainer(
            train,
            train_loop_config={"job": pickle.dumps(job)},  # what controls the workers would import all that it names
            torch_config=ray.train.torch.TorchConfig(timeout_s=int(self._timeout_s)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=cfg.start_workers if least == most else (least, most),
                use_gpu=cluster.use_gpu,
                resources_per_worker=resources,
                **({} if least == most else {"elastic_resize_monitor_interval_s": RESIZE_S}),
            ),
            run_config=ray.train.RunConfig(
                name=uuid.uuid4().hex,  # under a name it knows it would look for checkpoints of its own
                storage_path=scratch,
                logging_config=ray.train.LoggingConfig("INFO" if job.verbose else "CRITICAL"),
                failure_config=ray.train.FailureConfig(max_failures=cfg.max_failures),
                callbacks=[Failures(job.address, job.key)],
            ),
            embedded=cluster.embedded,
        )


class _RayGroup:
    """Ray Train at work, in a thread: in the main thread it would take over Ctrl-C."""

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
