"""A GPT that is sharded over the workers: of weights, gradients and optimizer state, each of two workers holds half.

It learns the characters of a generated text. Copy this file over `src/experiment.py`. The defaults train in seconds;
`models.net.layers=14 models.net.width=768` has 100 million parameters.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader

CHARACTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "gpt"
    num_epochs: int = 3
    start_workers: int = 2
    strategy: Literal["ddp", "fsdp"] = "fsdp"
    gradient_clip: float | None = 1.0
    monitor: str | None = "val/loss"
    mode: Literal["max", "min"] = "min"


def written(length: int, seed: int) -> str:
    """Return a text in a language of 200 made-up words, some frequent and some rare."""
    language, chance = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    letters = torch.randint(26, (200, 5), generator=language).tolist()
    words = ["".join(CHARACTERS[letter] for letter in word) for word in letters]
    drawn = torch.multinomial(1 / torch.arange(1.0, 201), length // 5, replacement=True, generator=chance)
    return " ".join(words[word] for word in drawn.tolist())[:length]


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a generated text: characters (context,) int64, and the next character for each of them."""

    def __init__(self, split: Literal["train", "val"] = "train", context: int = 64, batch_size: int = 16):
        self.context, self.batch_size = context, batch_size
        rows, seed = (1024, 1) if split == "train" else (128, 2)
        self.codes = torch.tensor([CHARACTERS.index(letter) for letter in written(rows * context + 1, seed)])

    def __len__(self) -> int:
        return len(self.codes) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.codes[index * self.context :][: self.context + 1]
        return window[:-1], window[1:]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
        """Stack samples into characters and next characters, both (n, context) int64."""
        inputs, targets = zip(*batch["item"], strict=True)
        return {"input": torch.stack(inputs), "target": torch.stack(targets)}


class Block(nn.Module):
    """Causal self-attention and an MLP with residual connections: (n, context, width) to the same shape."""

    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Characters (n, context) int64 to logits (n, context, characters)."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, longest: int = 256):
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(CHARACTERS), width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))  # each block becomes one shard unit
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        """Initialize all parameters, once they are sharded: no worker ever holds the whole model."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()


@dataclass
class Datasets:
    train: Text = Text()
    val: Text = Text(split="val")


@dataclass
class Models:
    net: Gpt = Gpt()

    map_params_to_optimizers = {"net": "adamw"}
    deferred_init = ("net",)  # built without memory, then sharded, then initialized by its `init_weights`


@dataclass
class Optimizers:
    adamw: AdamW = AdamW(DUMMY_PARAMS, lr=3e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)  # wraps it in DDP if cfg.strategy=ddp
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.one_pass(train, epoch, training=True)
            with torch.no_grad():
                self.one_pass(val, epoch, training=False)
            self.save_checkpoint(epoch=epoch)

    def one_pass(self, loader: Loader, epoch: int, *, training: bool) -> None:
        self.models.net.train(training)
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            loss = F.cross_entropy(self.models.net(batch["input"]).flatten(0, 1), batch["target"].flatten())
            if training:
                self.backward(loss)
                self.optimizer_step()
            self.metrics.loss.update(loss.detach(), weight=len(batch["input"]))
            self.save_metrics(batch_idx=batch_idx, epoch=epoch)
