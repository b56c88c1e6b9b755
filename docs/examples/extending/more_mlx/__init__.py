"""An engine, a kind of dataset, an extension of runs, and a command, for `mlx_runtime`."""
