"""A GAN: two models, two optimizers, and a loop that trains them alternately.

The generator learns to sample points from a ring of eight Gaussians. Copy this file over `src/experiment.py`.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "gan"
    num_epochs: int = 30
    start_workers: int = 2


class Ring(Dataset[torch.Tensor]):
    """Points (2,) float32 from eight Gaussians with centers on the unit circle."""

    def __init__(self, rows: int = 8192, batch_size: int = 128, deviation: float = 0.02):
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        angles = torch.randint(8, (rows,), generator=generator) * (math.pi / 4)
        centers = torch.stack([angles.cos(), angles.sin()], dim=1)
        self.points = centers + deviation * torch.randn(rows, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"point": torch.stack(batch["item"])}


class Generator(nn.Sequential):
    """Noise (n, latent) to points (n, 2)."""

    def __init__(self, latent: int = 16, width: int = 128):
        super().__init__(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.latent = latent


class Discriminator(nn.Sequential):
    """Points (n, 2) to logits (n, 1), positive for real ones."""

    def __init__(self, width: int = 128):
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


class Noise(Dataset[dict[str, torch.Tensor]]):
    """Noise (latent,) float32, the input of `predict`."""

    def __init__(self, rows: int = 64, latent: int = 16, batch_size: int = 64):
        self.batch_size = batch_size
        self.rows = torch.randn(rows, latent, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"noise": self.rows[index]}


@dataclass
class Datasets:
    train: Ring = Ring()
    predict: Noise = Noise()


@dataclass
class Models:
    generator: Generator = Generator()
    discriminator: Discriminator = Discriminator()

    map_params_to_optimizers = {"generator": "generator", "discriminator": "discriminator"}


@dataclass
class Optimizers:
    generator: Adam = Adam(DUMMY_PARAMS, lr=1e-3, betas=(0.5, 0.999))
    discriminator: Adam = Adam(DUMMY_PARAMS, lr=1e-3, betas=(0.5, 0.999))


@dataclass
class Metrics:
    generator_loss: MeanMetric = MeanMetric()
    discriminator_loss: MeanMetric = MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.latent = self.models.generator.latent
        self.models.generator = prepare_model(self.models.generator)
        self.models.discriminator = prepare_model(self.models.discriminator)
        train, _ = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.train_discriminator(batch["point"])
                self.train_generator(batch["point"])
                self.save_metrics(batch_idx=batch_idx, epoch=epoch)
            self.log({"ring/modes": self.modes(batch["point"].device)})
            self.save_checkpoint(epoch=epoch)

    def predict(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"point": self.models.generator(batch["noise"])}

    def noise(self, rows: int, device: torch.device) -> torch.Tensor:
        return torch.randn(rows, self.latent, device=device)  # different on each rank

    def train_discriminator(self, real: torch.Tensor) -> None:
        with torch.no_grad():
            fake = self.models.generator(self.noise(len(real), real.device))
        logits = self.models.discriminator(torch.cat([real, fake]))  # DDP: a second pass may change buffers
        wanted = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
        loss = F.binary_cross_entropy_with_logits(logits, wanted)
        self.backward(loss)
        self.optimizer_step("discriminator")
        self.metrics.discriminator_loss.update(loss.detach())

    def train_generator(self, real: torch.Tensor) -> None:
        logits = self.models.discriminator(self.models.generator(self.noise(len(real), real.device)))
        loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        self.backward(loss, optimizer="generator")  # leaves no gradients in the discriminator
        self.optimizer_step("generator")
        self.metrics.generator_loss.update(loss.detach())

    @torch.no_grad()
    def modes(self, device: torch.device) -> int:
        """Return the number of Gaussians that contain at least one of 1,000 generated points."""
        points = self.models.generator(self.noise(1000, device))
        near = (points.norm(dim=1) - 1).abs() < 0.1
        directions = torch.atan2(points[near, 1], points[near, 0]) / (math.pi / 4)
        hits = directions[(directions - directions.round()).abs() < 0.1].round() % 8
        return len(hits.unique())
