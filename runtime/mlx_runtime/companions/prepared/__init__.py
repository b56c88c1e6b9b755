"""Datasets mapped through `ray_map_batches` once, as columns that later runs map into memory."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before `mapping` imports Ray
