"""Engines of runs and sweeps, a strategy, a kind of dataset, an extension and a command, for `mlx_runtime`."""
