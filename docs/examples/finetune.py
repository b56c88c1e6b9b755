"""Fine-tuning: a pretrained backbone, a new head, epochs with a frozen backbone, and an average of the weights.

Copy this file over `src/experiment.py`. The weights come from `torch.save(net.state_dict(), path)` in another project
that uses other names for the layers. Train with

    mlx train run models.net.pretrained=weights.pt
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader
from src.datasets import Digits


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    """The settings of a run, and those of this experiment.

    Attributes:
        frozen_epochs: number of epochs that train only the head.
    """

    name: str = "finetune"
    num_epochs: int = 6
    start_workers: int = 2
    frozen_epochs: int = 2
    monitor: str | None = "val/accuracy"
    mode: Literal["max", "min"] = "max"


class Backbone(nn.Sequential):
    """Images (n, 1, 8, 8) to features (n, width)."""

    def __init__(self, width: int = 32):
        super().__init__(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.append(nn.Linear(4 * width, width))


class Classifier(nn.Module):
    """Images (n, 1, 8, 8) to logits (n, classes).

    Args:
        classes: number of outputs of the new head.
        width: number of features of the backbone.
        pretrained: file with a state_dict that contains the backbone as `encoder`; its other weights are ignored. The
            file is read when the model is constructed. A resumed run then loads its own checkpoint over the weights.

    Raises:
        RuntimeError: weights of the backbone are missing from the file, or have other shapes.
    """

    def __init__(self, classes: int = 10, width: int = 32, pretrained: Path | None = None):
        super().__init__()
        self.backbone = Backbone(width)
        self.head = nn.Linear(width, classes)
        if pretrained is not None:
            weights = torch.load(pretrained, map_location="cpu", weights_only=True)
            renamed = {name.removeprefix("encoder."): weights[name] for name in weights if name.startswith("encoder.")}
            self.backbone.load_state_dict(renamed)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


@dataclass
class Datasets:
    train: Digits = Digits(split="train")
    val: Digits = Digits(split="val", batch_size=128)


@dataclass
class Models:
    net: Classifier = Classifier()

    map_params_to_optimizers = {"net": "adamw"}


@dataclass
class Optimizers:
    adamw: AdamW = AdamW(DUMMY_PARAMS, lr=2e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()
    accuracy: MulticlassAccuracy = MulticlassAccuracy(num_classes=10, average="micro")


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        net = self.models.net
        self.ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # on self: checkpointed
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            if epoch in (self.cfg.start_epoch, self.cfg.frozen_epochs):  # also when resuming
                net.backbone.requires_grad_(epoch >= self.cfg.frozen_epochs)
                self.models.net = prepare_model(net)  # DDP checks only once which parameters are frozen
            self.train(train, epoch)
            self.evaluate(net, val, epoch, "val")
            self.evaluate(self.ema, val, epoch, "val_ema")
            self.save_checkpoint(epoch=epoch)

    def train(self, loader: Loader, epoch: int) -> None:
        self.models.net.train()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            logits = self.models.net(batch["image"])
            loss = F.cross_entropy(logits, batch["label"])
            self.optimizers.adamw.zero_grad()
            loss.backward()
            self.optimizers.adamw.step()
            self.ema.update_parameters(self.models.net)
            self.update_metrics(logits.detach(), batch["label"])
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)

    @torch.no_grad()
    def evaluate(self, net: nn.Module, loader: Loader, epoch: int, stage: str) -> None:
        net.eval()
        self.reset_all_metrics_and_losses()
        with self.stage(stage):
            for batch_idx, batch in enumerate(loader):
                self.update_metrics(net(batch["image"]), batch["label"])
                self.save_metrics(batch_idx=batch_idx, epoch=epoch)

    def update_metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.metrics.loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.metrics.accuracy.update(logits, labels)
