"""An experiment that uses `self.backward` and `self.optimizer_step`, and records when DDP synchronizes gradients."""
