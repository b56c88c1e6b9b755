"""The in-process engine: the driver trains, so that runs start fast and `breakpoint()` works."""

from collections.abc import Mapping

import ray.train
import ray.train.torch

from mlx_runtime.distributed.ray_private import quiet_ray_train
from mlx_runtime.settings import environment
from mlx_runtime.training.channel import Direct, Sink
from mlx_runtime.training.engines.base import Handle, StopAsked
from mlx_runtime.training.job import Job
from mlx_runtime.training.worker import train_to

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides the GPUs from Ray Train's `get_device`, which takes what torch sees."""


class InProcess:
    """The engine for `cfg.start_workers=0`.

    Args:
        use_gpu: False hides the GPUs of this machine.
    """

    notice = None

    def __init__(self, *, use_gpu: bool) -> None:
        self._use_gpu = use_gpu

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "_Alone":
        if not job.verbose:
            quiet_ray_train()
        return _Alone(job, Direct(handle, stop_asked), {} if self._use_gpu else NO_GPUS)

    def close(self) -> None:
        pass


class _Alone:
    """A group without workers: polling it trains, and returns at the end of the run."""

    def __init__(self, job: Job, sink: Sink, variables: Mapping[str, str]) -> None:
        self._job, self._sink, self._variables = job, sink, variables

    def poll(self) -> bool:
        with environment(self._variables, replace=True):
            ray.train.torch.TorchTrainer(
                lambda: train_to(self._sink, self._job), scaling_config=ray.train.ScalingConfig(num_workers=0)
            ).fit()
        return False

    def close(self) -> None:
        pass
