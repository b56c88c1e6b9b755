"""Metrics. Edit: write TorchMetrics Metrics; dist_reduce_fx in add_state combines the values of all workers."""

import torch
from torchmetrics import Metric


class MeanConfidence(Metric):
    """Mean probability of the most likely class, from logits (n, classes)."""

    higher_is_better = True
    full_state_update = False

    total: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total = self.total + logits.softmax(dim=1).amax(dim=1).sum()
        self.rows = self.rows + len(logits)

    def compute(self) -> torch.Tensor:
        return self.total / self.rows
