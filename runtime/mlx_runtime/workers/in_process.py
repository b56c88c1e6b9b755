"""The in-process engine: the driver trains, so that runs start fast and `breakpoint()` works."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from mlx_runtime import companions
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.loop.channel import Direct
from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked
from mlx_runtime.settings import environment
from mlx_runtime.workers.placement import changing_size, this_machine
from mlx_runtime.workers.worker import enter_ray_train, train_to


class InProcess:
    """The engine for `cfg.start_workers=0`. It is also its own group, without workers: polling it trains."""

    notice = None

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> None:
        return None

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Iterator[Cluster]:
        here = this_machine(cfg, "in-process engine")
        title = "0: training in this process"
        if sizes := changing_size(cfg):
            title += f"; {sizes.partition(' ')[0]} needs workers and has no effect"
        yield dataclasses.replace(here, title=title, cpus=0, in_driver=True, reads_streams=True)

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        self._cfg, self._variables = cfg, {} if cluster.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        self._stack = contextlib.ExitStack()

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "InProcess":
        if any(name not in job.prepared for name in stream_names(job.tree)):
            self._stack.enter_context(companions.part("ray.start").start_ray(self._cfg))
        self._train = partial(train_to, Direct(handle, stop_asked), job)
        enter_ray_train(job)
        return self

    def poll(self) -> bool:
        with environment(self._variables, replace=True):
            self._train(Topology(0, 1, device_here()))
        return False

    def waits_for(self) -> None:
        return None

    def close(self) -> None:
        self._stack.close()
