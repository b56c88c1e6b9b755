"""Several machines without a cluster: an engine whose other machines join the run with its key."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "commands roster")
