"""Ray clusters from outside: addresses, preflight checks, uploads and jobs."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this room imports Ray
