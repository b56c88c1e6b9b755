"""From a Dataset to batches: the sampling plan, readers and loaders."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this room imports Ray
