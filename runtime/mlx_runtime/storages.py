"""What storages of your own are made of: see the guide "Extending mlx"."""

from mlx_runtime.storage.files import Storage, Stored, storage_at

__all__ = ["Storage", "Stored", "storage_at"]
