"""`python -m mlx_runtime` is the command `mlx`."""

from mlx_runtime.cli import main

main()
