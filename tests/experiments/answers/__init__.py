"""An experiment with several parts of each kind, which writes down rows, devices and weights by rank."""

import mlx_runtime

mlx_runtime.defer_loading(__name__)
