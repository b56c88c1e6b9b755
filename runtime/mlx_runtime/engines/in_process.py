"""Training inside the driver's own process: no start-up, and `breakpoint()` works."""

import os

import ray.train
import ray.train.torch

from mlx_runtime.engines.base import Handle, StopAsked
from mlx_runtime.progress import Direct, Sink
from mlx_runtime.ray_private import quiet_ray_train
from mlx_runtime.training import Job, train_to


class InProcess:
    """The engine of `cfg.start_workers=0`.

    Args:
        use_gpu: False hides the GPUs of this machine.
    """

    notice = None

    def __init__(self, *, use_gpu: bool) -> None:
        self._use_gpu = use_gpu

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "_Alone":
        if not self._use_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray Train's `get_device` takes what torch sees
        if not job.verbose:
            quiet_ray_train()
        return _Alone(job, Direct(handle, stop_asked))

    def close(self) -> None:
        pass


class _Alone:
    """A group without workers: the driver trains when it is polled."""

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job, self._sink = job, sink

    def poll(self) -> bool:
        ray.train.torch.TorchTrainer(
            lambda: train_to(self._sink, self._job), scaling_config=ray.train.ScalingConfig(num_workers=0)
        ).fit()
        return False

    def close(self) -> None:
        pass
