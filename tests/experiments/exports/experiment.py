"""Texts of variable length and numbers, answered by two models; `kind` selects code that can be exported or cannot."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule

WIDTH = 8


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "exports"
    num_epochs: int = 1
    start_workers: int = 0


class Vocabulary:
    """Maps letters to ids, and is saved like a tokenizer of Hugging Face."""

    def __init__(self, letters: str = "abcdefgh"):
        self.letters = letters

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True)
        Path(folder, "vocabulary.json").write_text(json.dumps(self.letters))


class Texts(torch.utils.data.Dataset):
    def __init__(self, rows: int = 80, vocabulary: Vocabulary = Vocabulary()):
        self.rows, self.vocabulary, self.batch_size = rows, vocabulary, 8
        self.api_key = "<your key>"  # a placeholder is no secret

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        letters = self.vocabulary.letters
        text = "".join(letters[(index * 5 + step) % len(letters)] for step in range(index % 6 + 2))
        numbers = torch.linspace(-1, 1, 4) * (index % 7)
        return {"text": text, "numbers": numbers, "label": torch.tensor(index % 3)}

    def collate(self, rows):
        ids = [torch.tensor([self.vocabulary.letters.index(letter) + 1 for letter in row["text"]]) for row in rows]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        stacked = {name: torch.stack([row[name] for row in rows]) for name in ("numbers", "label")}
        return {"ids": padded, "mask": padded > 0, "text": [row["text"] for row in rows], **stacked}


class Encoder(nn.Module):
    def __init__(self, kind: str = "plain"):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(9, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.drop = nn.Dropout()

    def forward(self, ids, mask):
        hidden = self.drop(self.embed(ids)) * mask[..., None]
        if self.kind == "branch" and hidden.sum() > 0:
            hidden = 2 * hidden
        if self.kind == "recurrent":
            hidden = self.recurrent(hidden)[0]
        if self.kind == "dishonest" and torch.compiler.is_exporting():
            hidden = hidden * 1.01
        if self.kind == "nan":  # for texts of one length only
            hidden = hidden / (ids.shape[1] - 4)
        return hidden.sum(1) / mask.sum(1, keepdim=True)


class Head(nn.Module):
    def __init__(self, adapter: nn.Linear = nn.Linear(WIDTH, WIDTH)):
        super().__init__()
        self.adapter, self.norm = adapter, nn.BatchNorm1d(WIDTH)
        self.numbers, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, hidden, numbers):
        return self.out(torch.relu(self.norm(self.adapter(hidden) + self.numbers(numbers))))


@dataclass
class Datasets:
    train: Texts = Texts()
    test: Texts = Texts(rows=70)


@dataclass
class Models:
    encoder: Encoder = Encoder()
    head: Head = Head()

    map_params_to_optimizers = {"encoder": "sgd", "head": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.1)


@dataclass
class Losses:
    loss: nn.CrossEntropyLoss = nn.CrossEntropyLoss()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def worker_loop(self, dataset_shards):
        train, test = self.generate_loaders(dataset_shards=dataset_shards)
        for batch in train:
            self.backward(self.losses.loss(self.logits(batch), batch["label"]))
            self.optimizer_step("sgd")
        with self.evaluation():
            for batch in test:
                self.logits(batch)
        self.save_checkpoint(epoch=0)

    def logits(self, batch):
        return self.models.head(self.models.encoder(batch["ids"], batch["mask"]), batch["numbers"])

    def predict(self, batch):
        logits = self.logits(batch)
        return {"label": logits.argmax(1), "scores": logits.softmax(1)}
