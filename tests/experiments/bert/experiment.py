"""Fine-tuning of a classifier from the Hugging Face Hub."""

from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from datasets import load_dataset
from torch import nn
from torchmetrics import MeanMetric
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "bert"
    num_epochs: int = 1
    start_workers: int = 2


class Reviews:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained("org/bert"),
        file: Path = Path("src", "reviews.jsonl"),
        batch_size: int = 4,
    ):
        self.tokenizer, self.file, self.batch_size = tokenizer, file, batch_size
        self.collate = DataCollatorWithPadding(tokenizer)
        self.group_by_length = "input_ids"

    def to_hf(self) -> datasets.Dataset:
        rows = load_dataset("json", data_files=str(self.file), split="train")
        return rows.map(self.tokenizer, input_columns="text", remove_columns="text", batched=True)


@dataclass
class Datasets:
    train: Reviews = Reviews()


@dataclass
class Models:
    net: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained("org/bert", num_labels=2)

    map_params_to_optimizers = {"net": "adamw"}


@dataclass
class Optimizers:
    adamw: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=1e-3)


@dataclass
class Metrics:
    loss: MeanMetric = MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    metrics: Metrics

    def predict(self, batch):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return {"logits": self.models.net(**inputs).logits}

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.models.net.train()
            for batch_idx, batch in enumerate(train):
                logits = self.models.net(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
                loss = nn.functional.cross_entropy(logits, batch["labels"])
                self.optimizers.adamw.zero_grad()
                loss.backward()
                self.optimizers.adamw.step()
                self.metrics.loss.update(loss.detach())
                self.save_metrics(batch_idx=batch_idx, epoch=epoch)
            self.save_checkpoint(epoch=epoch)
