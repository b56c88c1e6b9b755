"""The workload under mlx."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from src.workload import CHECKPOINTS, LEARNING_RATE, Gpt, Record, Tokens, step


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "sharding"
    strategy: str = "fsdp"
    num_epochs: int = 1
    keep_checkpoints: int = CHECKPOINTS
    checkpoint: bool = False
    waits: tuple[int, ...] = ()  # numbers of steps after which the benchmark changes something
    out: Path = Path("measured.json")


@dataclass
class Datasets:
    train: Tokens = Tokens()


@dataclass
class Models:
    net: Gpt = Gpt()

    map_params_to_optimizers = {"net": "adam"}
    deferred_init = ("net",)


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS, lr=LEARNING_RATE)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers

    def worker_loop(self, dataset_shards) -> None:
        record, network = Record(), prepare_model(self.models.net)
        self.models.net = network
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        for number, batch in enumerate(train, 1):
            step(network, self.optimizers.adam, batch["input"], batch["target"])
            record.tick()
            if number in self.cfg.waits:
                record.wait(self.cfg.out.with_suffix(".waits"))
        record.trained()
        if self.cfg.checkpoint:
            record.checkpoints(self.begin_checkpoint, self.restore_checkpoint)
        record.write(self.cfg.out)

    def begin_checkpoint(self, epoch: int) -> Callable[[], object]:
        self.save_checkpoint(epoch=epoch)
        return partial(self.wait_until_published, 1 + epoch)

    def wait_until_published(self, count: int) -> None:
        runs = self.cfg.out.parent / "runs"
        while dist.get_rank() == 0 and len([*runs.glob("*/*/checkpoints/*/checkpoint.json")]) < count:
            time.sleep(0.005)
