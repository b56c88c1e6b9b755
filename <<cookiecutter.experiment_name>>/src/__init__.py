"""The experiment. Edit models, datasets and experiment; then `make bind` and `make run`."""

import mlx_runtime

mlx_runtime.defer_loading(__name__)  # datasets and pretrained models in defaults are loaded by workers, not by imports
