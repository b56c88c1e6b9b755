"""The in-process engine: the driver trains, so that runs start fast and `breakpoint()` works."""

from functools import partial

from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.importing import after_import
from mlx_runtime.settings import environment
from mlx_runtime.training.channel import Direct
from mlx_runtime.training.engines.base import Handle, StopAsked
from mlx_runtime.training.job import Job
from mlx_runtime.training.worker import train_to


class InProcess:
    """The engine for `cfg.start_workers=0`, and its group, which has no workers: polling it trains."""

    notice = None

    def __init__(self, *, use_gpu: bool) -> None:
        self._variables = {} if use_gpu else {"CUDA_VISIBLE_DEVICES": ""}

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "InProcess":
        self._train = partial(train_to, Direct(handle, stop_asked), job)
        after_import("ray", partial(_enter_ray_train, job))
        return self

    def poll(self) -> bool:
        with environment(self._variables, replace=True):
            self._train(Topology(0, 1, device_here()))
        return False

    def waits_for(self) -> None:
        return None

    def close(self) -> None:
        pass


def _enter_ray_train(job: Job) -> None:
    from mlx_runtime.distributed.ray_private import enter_ray_train_alone, quiet_ray_train

    enter_ray_train_alone(job.run.experiment)
    if not job.verbose:
        quiet_ray_train()
