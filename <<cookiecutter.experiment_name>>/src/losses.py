"""Losses. Edit: name functions that return the mean loss of a batch, or write TorchMetrics Metrics."""

from mlx_runtime.losses import Mean
from torch.nn import functional as F


class CrossEntropy(Mean):
    """Mean cross-entropy of logits (n, classes) against labels (n,).

    Calling it returns the loss of the batch, for `self.backward`, and adds the batch to the mean of the epoch, over all
    rows of all workers.
    """

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__(F.cross_entropy, label_smoothing=label_smoothing)
