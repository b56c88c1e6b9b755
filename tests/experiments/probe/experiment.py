import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torchmetrics
from ray.train.torch import prepare_model
from torch import nn
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "probe"
    num_epochs: int = 2
    log_every_steps: int = 3
    fault: str | None = None
    out: Path = Path("seen")


class Rows(Dataset):
    made: ClassVar[list[str]] = []

    def __init__(self, rows: int = 53, batch_size: int = 4):
        self.made.append(type(self).__name__)
        self.batch_size = batch_size
        self.values = torch.arange(rows, dtype=torch.float32)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"row": torch.stack(batch["item"])}


class TestRows(Rows):
    pass


class NeverRead(Rows):
    def __init__(self, rows: int = 5):
        raise RuntimeError("a dataset that nobody reads was made")


def linear(width: int) -> nn.Linear:
    return nn.Linear(1, width)


class Net(nn.Module):
    def __init__(self, layer: nn.Linear = linear(3), act: nn.Module = nn.GELU(), dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layers = nn.Sequential(layer, act).to(dtype)

    def forward(self, x):
        return self.layers(x).sum(dim=1)


class Stack(nn.Module):
    def __init__(self, layers: nn.Sequential = nn.Sequential(*[nn.Linear(1, 1) for _ in range(2)])):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)[:, 0]


@dataclass
class Datasets:
    train: Rows = Rows()
    test: TestRows = TestRows(rows=31)
    spare: NeverRead = NeverRead()


@dataclass
class Models:
    first: Net = Net()
    second: Stack = Stack()
    third: Net = Net(act=nn.ReLU())
    teacher: Net = Net()

    map_params_to_optimizers = {"first": "adam", "second": "adam", "third": "sgd"}


@dataclass
class Optimizers:
    adam: torch.optim.Adam = torch.optim.Adam(DUMMY_PARAMS)
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.01)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


@dataclass
class Metrics:
    mean: torchmetrics.MeanMetric = torchmetrics.MeanMetric()
    both: torchmetrics.MetricCollection = torchmetrics.MetricCollection(
        [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()]
    )


class Counter:
    def __init__(self, start: int = 0):
        self.count = start
        self.history: list[float] = []


@dataclass
class Tools:
    counter: Counter = Counter()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards):
        if self.cfg.fault == "early":
            raise KeyError("before anything")
        teacher = [item.clone() for item in self.models.teacher.parameters()]
        self.models.first = prepare_model(self.models.first)
        self.models.second = prepare_model(self.models.second)
        self.models.third = prepare_model(self.models.third)
        train, test, _ = self.generate_loaders(dataset_shards=dataset_shards)
        seen = {"started": self.cfg.start_epoch}
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.read(train, epoch, update=True)
            self.read(test, epoch, update=False)
            self.tools.counter.count += 1
            self.save_checkpoint(epoch=epoch, metrics={"mine": epoch})
        seen["weights"] = [item.tolist() for item in self.models.first.parameters()]
        seen["teacher_unchanged"] = all(
            torch.equal(a, b) for a, b in zip(teacher, self.models.teacher.parameters(), strict=True)
        )
        seen["made"] = Rows.made
        seen["threads"] = torch.get_num_threads()
        seen["random"] = torch.rand(1).item()
        seen["counter"] = self.tools.counter.count
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.cfg.out.mkdir(exist_ok=True)
        (self.cfg.out / f"rank_{rank}.json").write_text(json.dumps(seen))

    def read(self, loader, epoch, update):
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            rows = batch["row"]
            output = self.models.first(rows[:, None]) + self.models.second(rows[:, None])
            output = output + self.models.third(rows[:, None])
            loss = self.losses.mse(output, rows)
            if update:
                loss.backward()
                for optimizer in (self.optimizers.adam, self.optimizers.sgd):
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if self.cfg.fault == "rank1" and batch_idx == 2 and (not dist.is_initialized() or dist.get_rank() == 1):
                raise ValueError("only this rank")
            self.metrics.mean.update(rows)
            self.metrics.both.update(output.detach(), rows)
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
