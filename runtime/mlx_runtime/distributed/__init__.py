"""The position of this worker among all workers, and collectives between them."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this room imports Ray
