"""Building blocks for custom storages; see the guide "Extending mlx"."""

from mlx_runtime.storage import Storage, Stored, storage_at

__all__ = ["Storage", "Stored", "storage_at"]
