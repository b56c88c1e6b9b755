"""Mirrors of runs on the Hugging Face Hub: uploaded while they train, read back, and continued on another machine."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands extension pins remote",
    contents="SweepSummary",
    datasets="Batched adopt_dataset batch_size_cure loading_lock",
    pushing="push",
    screening="screen",
)
