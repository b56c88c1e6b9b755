"""An experiment that uses `self.backward` and `self.optimizer_step`, and records when DDP synchronizes gradients."""

import mlx_runtime

mlx_runtime.defer_loading(__name__)
