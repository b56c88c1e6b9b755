"""From a Dataset to batches: the sampling plan, readers and loaders."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    batches="Batch BatchReader as_numpy check device_copies dtype_name move_tensors rows_of",
    definitions="adopt_dataset construction dataset_nodes stream_names",
    errors="dataset_error",
    loaders="DatasetShard DatasetShards Loader LoaderOptions reading_processes trains",
    prefetching="read_ahead",
    sampling="LOADER_ARGUMENTS ShardPlan Subset WorkerPass mix_seeds shuffled_share",
)
