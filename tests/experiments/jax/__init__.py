from mlx_runtime import defer_loading

defer_loading(__name__)
