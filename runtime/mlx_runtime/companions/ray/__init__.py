"""Ray: the engine that places workers on a cluster, streams of rows, preflight checks, uploads and jobs."""

from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this companion imports Ray
