"""Text of variable length: a tokenizer configured in conf.yaml, and batches padded to their longest text.

The classifier learns to distinguish praise from complaints. Copy this file over `src/experiment.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam
from torch.utils.data import Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader

PADDING = 0
"""The token that pads batches."""

SUBJECTS = ("the film", "this book", "her new song", "the long first chapter", "that restaurant by the river")
PRAISE = ("wonderful", "moving", "a delight", "worth every minute")
BLAME = ("dull", "far too long", "a waste of time", "badly made")


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "text"
    num_epochs: int = 3
    start_workers: int = 2
    monitor: str | None = "val/accuracy"
    mode: Literal["max", "min"] = "max"


class Tokenizer:
    """Maps the bytes of a text to tokens 1 to 256.

    Args:
        longest: maximum number of tokens; longer texts are truncated.
    """

    size = 257

    def __init__(self, longest: int = 64):
        self.longest = longest

    def __call__(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, (length,) int64."""
        return torch.tensor([1 + byte for byte in text.encode()][: self.longest])


class Reviews(Dataset[tuple[torch.Tensor, int]]):
    """Generated reviews: tokens (length,) int64, and 1 for praise or 0 for complaints."""

    def __init__(
        self, split: Literal["train", "val"] = "train", tokenizer: Tokenizer = Tokenizer(), batch_size: int = 32
    ):
        self.tokenizer, self.batch_size = tokenizer, batch_size
        chance = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.rows = [self._made(chance) for _ in range(2000 if split == "train" else 400)]

    @staticmethod
    def _made(chance: torch.Generator) -> tuple[str, int]:
        subject, word, label = (int(torch.randint(high, (), generator=chance)) for high in (len(SUBJECTS), 4, 2))
        return f"{SUBJECTS[subject]} is {(BLAME, PRAISE)[label][word]}", label

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        text, label = self.rows[index]
        return self.tokenizer(text), label

    @staticmethod
    def ray_map_batches(batch: dict[str, list[tuple[torch.Tensor, int]]]) -> dict[str, torch.Tensor]:
        """Stack samples into padded tokens (n, longest text of the batch) int64 and labels (n,) int64."""
        tokens, labels = zip(*batch["item"], strict=True)
        return {
            "tokens": pad_sequence(list(tokens), batch_first=True, padding_value=PADDING),
            "label": torch.tensor(labels),
        }


class Classifier(nn.Module):
    """Tokens (n, length) to logits (n,): embeddings, a GRU, and the mean of its states over the tokens of the text."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.embedding = nn.Embedding(Tokenizer.size, width, padding_idx=PADDING)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.embedding(tokens))
        text = (tokens != PADDING).unsqueeze(2)
        return self.head((states * text).sum(1) / text.sum(1)).squeeze(1)


@dataclass
class Datasets:
    train: Reviews = Reviews()
    val: Reviews = Reviews(split="val", batch_size=100)


@dataclass
class Models:
    net: Classifier = Classifier()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: Adam = Adam(DUMMY_PARAMS, lr=3e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()
    accuracy: BinaryAccuracy = BinaryAccuracy()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.one_pass(train, epoch, training=True)
            with torch.no_grad():
                self.one_pass(val, epoch, training=False)
            self.save_checkpoint(epoch=epoch)

    def predict(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"praise": self.models.net(batch["tokens"]).sigmoid()}

    def one_pass(self, loader: Loader, epoch: int, *, training: bool) -> None:
        self.models.net.train(training)
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            logits = self.models.net(batch["tokens"])
            loss = F.binary_cross_entropy_with_logits(logits, batch["label"].float())
            if training:
                self.optimizers.adam.zero_grad()
                loss.backward()
                self.optimizers.adam.step()
            self.metrics.loss.update(loss.detach(), weight=len(logits))
            self.metrics.accuracy.update(logits.detach().sigmoid(), batch["label"])
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)
