"""An experiment whose loop leaves its steps to `self.backward` and `self.optimizer_step`, and notes what DDP shares."""
