"""The in-process engine: the driver trains, so that runs start fast and `breakpoint()` works."""

import ray.train.torch

from mlx_runtime.distributed.ray_private import quiet_ray_train
from mlx_runtime.settings import environment
from mlx_runtime.training.channel import Direct
from mlx_runtime.training.engines.base import Handle, StopAsked
from mlx_runtime.training.job import Job
from mlx_runtime.training.worker import train_to


class InProcess:
    """The engine for `cfg.start_workers=0`, and its group, which has no workers: polling it trains."""

    notice = None

    def __init__(self, *, use_gpu: bool) -> None:
        # Ray Train's `get_device` takes what torch sees.
        self._variables = {} if use_gpu else {"CUDA_VISIBLE_DEVICES": ""}

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "InProcess":
        if not job.verbose:
            quiet_ray_train()
        sink, alone = Direct(handle, stop_asked), ray.train.ScalingConfig(num_workers=0)
        self._trainer = ray.train.torch.TorchTrainer(lambda: train_to(sink, job), scaling_config=alone)
        return self

    def poll(self) -> bool:
        with environment(self._variables, replace=True):
            self._trainer.fit()
        return False

    def waits_for(self) -> None:
        return None

    def close(self) -> None:
        pass
