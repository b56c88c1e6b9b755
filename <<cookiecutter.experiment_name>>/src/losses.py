"""Losses. Edit: write TorchMetrics Metrics, so that epoch values are means over all rows of all workers."""

import torch
from torch.nn import functional as F
from torchmetrics import Metric


class CrossEntropy(Metric):
    """Mean cross-entropy of logits (n, classes) against labels (n,).

    Calling it returns the loss of the batch, for `.backward()`, and adds the batch to the mean of the epoch.
    """

    is_differentiable = True
    higher_is_better = False
    full_state_update = False  # one update per call instead of two

    total: torch.Tensor
    rows: torch.Tensor

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total = self.total + F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="sum")
        self.rows = self.rows + len(labels)

    def compute(self) -> torch.Tensor:
        return self.total / self.rows
