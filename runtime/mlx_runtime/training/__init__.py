"""One run: the driver, the workers, and the session that user code calls."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this room imports Ray
