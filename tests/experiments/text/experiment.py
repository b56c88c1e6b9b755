"""Hugging Face datasets, read by a loop that writes down the rows."""

import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch import nn

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule
from mlx_runtime.datasets import Batched


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "text"
    num_epochs: int = 2
    start_workers: int = 2


def padded(rows):
    longest = max(len(row["tokens"]) for row in rows)
    return {
        "row": torch.tensor([row["row"] for row in rows]),
        "tokens": torch.tensor([row["tokens"] + [0] * (longest - len(row["tokens"])) for row in rows]),
    }


def tokenized(row):
    with Path("mapped.txt").open("a") as file:
        file.write(f"{row['row']}\n")
    return {"tokens": list(row["text"].encode())}


class Texts:
    def __init__(self, split: str = "train", batch_size: int = 4):
        self.split, self.batch_size, self.collate = split, batch_size, padded

    def to_hf(self):
        rows = load_dataset("json", data_files={"train": "rows.jsonl", "val": "rows.jsonl"}, split=self.split)
        return rows.map(tokenized, remove_columns="text")


def some(rows: int = 9, batch_size: int = 2) -> datasets.Dataset:
    Path("made.txt").touch()
    return datasets.Dataset.from_dict({"row": list(range(rows))})


@dataclass
class Datasets:
    train: Texts = Texts()
    more: datasets.Dataset = some()
    val: Batched = Batched(load_dataset("json", data_files="rows.jsonl", split="train"), batch_size=8)


@dataclass
class Models:
    net: nn.Linear = nn.Linear(1, 1)

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.0)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers

    def worker_loop(self, dataset_shards):
        seen = {}
        for loader in self.generate_loaders(dataset_shards=dataset_shards):
            seen[loader.shard.name] = [[batch["row"].tolist() for batch in loader] for _ in range(self.cfg.num_epochs)]
        rank = dist.get_rank() if dist.is_initialized() else 0
        Path(f"rank_{rank}.json").write_text(json.dumps(seen))
