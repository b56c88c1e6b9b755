"""From a Dataset to batches: the sampling plan, readers and loaders."""
