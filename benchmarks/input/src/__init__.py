"""An experiment that only measures the speed of reading its datasets."""

import mlx_runtime

mlx_runtime.defer_loading(__name__)
