import torch
from torch.nn import functional as F
from torchmetrics import Metric


class HuberLossMetric(Metric):
    def __init__(self, delta: float = 1.0):
        super().__init__()
        self.delta = delta
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor):
        self.total += F.huber_loss(preds, target, delta=self.delta, reduction="sum")
        self.count += target.numel()

    def compute(self):
        return self.total / self.count
