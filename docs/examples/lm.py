"""A language model that reads one long text in order, trained for a number of steps and not of epochs.

The state of the LSTM is carried from batch to batch, and a run that resumes in the middle of the text has it back. Copy
this file over `src/experiment.py`, run `mlx train bind`, and let conf.yaml say once how many words there are:

    datasets: val: vocabulary: ${datasets.train.vocabulary}
    models: net: vocabulary: ${datasets.train.vocabulary}
"""

import collections
import re
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.datasets import DatasetShards, Loader
from mlx_runtime.losses import Mean


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "lm"
    num_epochs: int = 1000  # more than max_steps allows
    max_steps: int | None = 400
    evaluate_every_steps: int | None = 80
    start_workers: int = 2
    gradient_clip: float | None = 1.0
    monitor: str | None = "val/cross_entropy"
    mode: Literal["max", "min"] = "min"


class Text(Dataset[torch.Tensor]):
    """Words of Python's language reference, (context + 1,) int64, in `streams` parts that are read side by side.

    Row `i + streams` continues row `i`. All workers together read one row of each stream per step.

    Args:
        vocabulary: number of distinct words: the most frequent ones, and 0 for all others.
    """

    def __init__(
        self,
        split: Literal["train", "val"] = "train",
        vocabulary: int = 1000,
        context: int = 32,
        streams: int = 32,
    ):
        workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.batch_size, self.shuffle, self.prepare = streams // workers, False, False
        self.context, self.row_counts = context, {"tokens": context}
        words = re.findall(r"\w+|[^\w\s]", " ".join(topics.values()))
        frequent = [word for word, _ in collections.Counter(words).most_common(vocabulary - 1)]
        numbers = {word: 1 + number for number, word in enumerate(frequent)}
        border = len(words) * 9 // 10
        words = words[:border] if split == "train" else words[border:]
        self.steps = (len(words) // streams - 1) // context
        codes = [numbers.get(word, 0) for word in words[: streams * (self.steps * context + 1)]]
        self.streams = torch.tensor(codes).view(streams, -1)

    def __len__(self) -> int:
        return self.steps * len(self.streams)

    def __getitem__(self, index: int) -> torch.Tensor:
        step, stream = divmod(index, len(self.streams))
        return self.streams[stream, step * self.context :][: self.context + 1]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Stack samples into words and next words, both (n, context) int64."""
        words = torch.stack(batch["item"])
        return {"words": words[:, :-1], "next": words[:, 1:]}


State = tuple[torch.Tensor, torch.Tensor]


class Lstm(nn.Module):
    """Words (n, context) and the state before them, to logits (n, context, vocabulary) and the state after them."""

    def __init__(self, vocabulary: int = 1000, width: int = 64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, words: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        outputs, state = self.lstm(self.embedding(words), state)
        return self.head(outputs), state


class Carried:
    """State of the LSTM after the previous batch."""

    per_worker = True  # each worker reads streams of its own

    def __init__(self) -> None:
        self.state: State | None = None


@dataclass
class Datasets:
    train: Text = Text()
    val: Text = Text(split="val")


@dataclass
class Models:
    net: Lstm = Lstm()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: Adam = Adam(DUMMY_PARAMS, lr=5e-3)


@dataclass
class Losses:
    cross_entropy: Mean = Mean(F.cross_entropy)


@dataclass
class Tools:
    carried: Carried = Carried()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    tools: Tools

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.net = prepare_model(self.models.net)
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            self.tools.carried.state = None  # undone if the epoch is resumed, like the line above
            for batch_idx, batch in enumerate(train):
                logits, (h, c) = self.models.net(batch["words"], self.tools.carried.state)
                self.tools.carried.state = h.detach(), c.detach()
                self.backward(self.losses.cross_entropy(logits.flatten(0, 1), batch["next"].flatten()))
                self.optimizer_step()
                self.save_losses(batch_idx=batch_idx, epoch=epoch)
                if self.every(self.cfg.evaluate_every_steps):
                    self.evaluate(val, epoch)
                    self.save_checkpoint(epoch=epoch)

    def evaluate(self, loader: Loader, epoch: int) -> None:
        state = None
        with self.evaluation():
            for batch_idx, batch in enumerate(loader):
                logits, state = self.models.net(batch["words"], state)
                self.losses.cross_entropy.update(logits.flatten(0, 1), batch["next"].flatten())
                self.save_losses(batch_idx=batch_idx, epoch=epoch)
