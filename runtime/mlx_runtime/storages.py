"""Building blocks for custom storages; see the guide "Extending mlx"."""

from mlx_runtime.storage.files import Storage, Stored, storage_at

__all__ = ["Storage", "Stored", "storage_at"]
