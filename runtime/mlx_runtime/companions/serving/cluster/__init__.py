"""Models on a Ray cluster: the same application in replicas of Ray Serve."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "client",
)
