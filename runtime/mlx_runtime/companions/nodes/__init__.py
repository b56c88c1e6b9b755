"""Several machines without a cluster: an engine whose other machines join the run with its key."""
