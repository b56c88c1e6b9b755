"""One run: the driver, the workers, and the session that user code calls."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before user code imports Ray or a library of Hugging Face
