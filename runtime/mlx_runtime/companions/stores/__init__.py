"""Object stores: S3, Google Cloud Storage, Azure and HDFS, through pyarrow."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    object_store="ObjectStore",
)
