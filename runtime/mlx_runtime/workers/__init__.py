"""Processes that train: engines, the fork server, the worker, and the detection of deadlocks."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before user code imports Ray or a library of Hugging Face
