"""An experiment with a trained model, a frozen one, and several datasets, losses, metrics and tools."""

import mlx_runtime

mlx_runtime.defer_loading(__name__)
