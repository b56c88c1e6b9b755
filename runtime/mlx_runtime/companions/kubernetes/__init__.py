"""Kubernetes: runs and sweeps as RayJobs of KubeRay, which start their own cluster and resume after failures."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "commands")
