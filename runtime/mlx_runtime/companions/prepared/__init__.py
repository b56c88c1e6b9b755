"""Datasets mapped through `ray_map_batches` once, as columns that later runs map into memory."""

from mlx_runtime.importing import door
from mlx_runtime.settings import prepare_ray

prepare_ray()  # before `mapping` imports Ray

__all__, __getattr__ = door(
    __name__,
    "commands",
    columns="PreparedReader",
    datasets="mark_used prepare_datasets unprepared_streams",
    fingerprints="digest",
    store="PreparedSet Store",
)
