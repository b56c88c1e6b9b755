"""What storages of your own are made of: see the guide "Extending mlx"."""

from mlx_runtime.storage import Storage, Stored, storage_at

__all__ = ["Storage", "Stored", "storage_at"]
