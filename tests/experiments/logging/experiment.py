"""An experiment that logs many numbers, and records the calls of its listeners."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model


class Heard:
    """Writes down each call. Has no base class."""

    def __init__(self, file: str = "heard.jsonl", fails: str = ""):
        self.file, self.fails = Path(file).absolute(), fails

    def _note(self, hook: str, **facts: object) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps({"hook": hook, "pid": os.getpid(), **facts}) + "\n")
        if hook == self.fails:
            raise RuntimeError("out of order")

    def on_run_start(self, run):
        self._note("on_run_start", run=run.name, attempt=run.attempt, seed=run.config["cfg"]["seed"])

    def on_report(self, report):
        self._note("on_report", step=report.step, epoch=report.epoch, values=dict(report.values))

    def on_epoch_end(self, epoch, values):
        self._note("on_epoch_end", epoch=epoch, names=sorted(values))

    def on_checkpoint(self, checkpoint):
        self._note("on_checkpoint", name=Path(checkpoint["path"]).name, epoch=checkpoint["epoch"])

    def on_exception(self, error):
        self._note("on_exception", error=str(error))

    def on_run_end(self, status, metrics):
        self._note("on_run_end", status=status, names=sorted(metrics))


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "logging"
    num_epochs: int = 2
    log_every_steps: int = 2
    fault: str = ""


class Rows(Dataset):
    def __init__(self, rows: int = 48, batch_size: int = 4):
        self.batch_size, self.rows = batch_size, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor([float(index)]) / self.rows

    @staticmethod
    def ray_map_batches(batch):
        return {"row": torch.stack(batch["item"])}


@dataclass
class Datasets:
    train: Rows = Rows()
    val: Rows = Rows(rows=16)


@dataclass
class Models:
    net: nn.Linear = nn.Linear(1, 1)

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.1)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


@dataclass
class Metrics:
    auroc: torchmetrics.classification.BinaryAUROC = torchmetrics.classification.BinaryAUROC()
    mean: torchmetrics.MeanMetric = torchmetrics.MeanMetric()
    unused: torchmetrics.MeanMetric = torchmetrics.MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        train, val = self.generate_loaders(dataset_shards=dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.read(train, epoch, learn=True)
            self.read(val, epoch)
            with self.stage("val_again"):
                self.read(val, epoch)
            with self.stage("test_own"):  # a loader unknown to the runtime
                self.read(self.own(8), epoch)
            self.read(self.own(4), epoch, stage="val_own")
            self.read(self.own(12), epoch, stage="test_named")
            self.save_metrics_and_losses(batch_idx=2, epoch=epoch, stage="test_after")  # the same numbers after a pass
            self.log({"own/epochs": epoch + 1.0, "own/tensor": torch.tensor(2.5)})
            self.tensorboard.add_text("note", f"epoch {epoch}", self.global_step)
            self.save_checkpoint(epoch=epoch)
        if self.cfg.fault == "late":
            raise ValueError("at the very end")

    @staticmethod
    def own(rows):
        return ({"row": row} for row in DataLoader(Rows(rows=rows), batch_size=4))

    def read(self, loader, epoch, learn=False, stage=None):
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            row = batch["row"][:, 0]
            output = self.models.net(batch["row"])[:, 0]
            loss = self.losses.mse(output, row)
            if learn:
                (loss * math.nan if self.cfg.fault == "explodes" and batch_idx == 3 else loss).backward()
                self.optimizers.sgd.step()
                self.optimizers.sgd.zero_grad()
            self.metrics.mean.update(row)
            self.metrics.auroc.update(row, (row > 0.5).long())
            if self.cfg.fault == "alone" and mlx_rank() == 1:
                continue
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch, stage=stage)


def mlx_rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
