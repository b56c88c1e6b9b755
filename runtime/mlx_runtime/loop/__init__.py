"""One worker from the inside: the experiment, its session, passes, updates, metrics and checkpoints."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before user code imports Ray or a library of Hugging Face
