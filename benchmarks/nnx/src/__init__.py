import mlx_runtime

mlx_runtime.defer_loading(__name__)
