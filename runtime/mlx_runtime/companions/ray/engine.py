"""The Ray engine: workers are actors on a cluster, or in a Ray embedded in the driver, which must be running.

Methods import Ray when they need it, because `launch` only calls `refusal`, and must be quick.
"""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.ray.start import on_ray
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked
from mlx_runtime.workers.placement import JOB_FLAG

if TYPE_CHECKING:
    from mlx_runtime.companions.ray.group import RayGroup


class OnRay:
    """The engine for clusters and for Ray embedded in the driver."""

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> str | None:
        if in_job and cfg.strategy == "pipeline" and cfg.fragments.plan is not None:
            return (
                "cfg.fragments.plan is for machines that run `mlx train join`; Ray chooses the nodes of a cluster, and "
                "cfg.fragments.plan=null cuts models into stages with about equal numbers of parameters"
            )
        return None

    @staticmethod
    def connect(cfg: Any, why: str) -> AbstractContextManager[Cluster]:
        if reason := OnRay.refusal(cfg, in_job=JOB_FLAG in os.environ):
            raise ConfigError(reason)
        return on_ray(cfg, why)

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        self._arguments = cfg, cluster, timeout_s

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "RayGroup":
        from mlx_runtime.companions.ray.group import RayGroup

        return RayGroup(*self._arguments, job, handle, stop_asked)

    def close(self) -> None:
        """Do nothing: Ray ends with the connection of the driver."""
