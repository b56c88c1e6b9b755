"""Sentences of different lengths: two inputs, two models, a tool, texts and labels in the batches."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "answers"
    num_epochs: int = 1
    start_workers: int = 0


class Sentences(Dataset):
    def __init__(self, rows: int = 24, batch_size: int = 4):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        tokens = [(index * 7 + place) % 11 + 1 for place in range(2 + index % 5)]
        return {"text": " ".join(map(str, tokens)), "tokens": tokens, "age": index / 10, "label": index % 2}

    @staticmethod
    def collate(rows):
        longest = max(len(row["tokens"]) for row in rows)
        return {
            "text": [row["text"] for row in rows],
            "tokens": torch.tensor([row["tokens"] + [0] * (longest - len(row["tokens"])) for row in rows]),
            "age": torch.tensor([row["age"] for row in rows]),
            "label": torch.tensor([row["label"] for row in rows]),
        }


class Scaler:
    """Mean age of the rows seen in training."""

    def __init__(self) -> None:
        self.mean = 0.0


@dataclass
class Datasets:
    train: Sentences = Sentences()
    val: Sentences = Sentences(rows=8)


@dataclass
class Models:
    words: nn.EmbeddingBag = nn.EmbeddingBag(12, 4, mode="sum", padding_idx=0)
    head: nn.Linear = nn.Linear(5, 2)

    map_params_to_optimizers = {"words": "sgd", "head": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.1)


@dataclass
class Tools:
    scaler: Scaler = Scaler()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    tools: Tools

    def logits(self, batch):
        words = self.models.words(batch["tokens"])
        return self.models.head(torch.cat([words, (batch["age"] - self.tools.scaler.mean).unsqueeze(1)], dim=1))

    def worker_loop(self, dataset_shards):
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.tools.scaler.mean = 1.15
            for batch in train:
                nn.functional.cross_entropy(self.logits(batch), batch["label"]).backward()
                self.optimizers.sgd.step()
                self.optimizers.sgd.zero_grad()
            with torch.no_grad():
                right = sum(float((self.logits(batch).argmax(1) == batch["label"]).sum()) for batch in val)
            self.save_checkpoint(epoch, {"val/right": right})

    def predict(self, batch):
        if (batch["age"] > 100).any():
            raise ValueError("nobody is that old")
        return {"label": self.logits(batch).argmax(1), "logits": self.logits(batch)}
