import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "steps"
    num_epochs: int = 3
    fault_step: int = field(default=-1, metadata={"resumable": True})  # number in the whole run, from 0
    out: Path = Path("seen")


class Rows(Dataset):
    def __init__(self, rows: int = 40, batch_size: int = 2):
        self.batch_size = batch_size
        self.values = 3 * torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Net(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


@dataclass
class Datasets:
    train: Rows = Rows()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.05, momentum=0.9)


@dataclass
class Losses:
    mse: torchmetrics.MeanSquaredError = torchmetrics.MeanSquaredError()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        seen = {"shared": [], "updates": [], "global_steps": []}
        shared = 0

        def share(state, bucket):
            nonlocal shared
            shared += 1
            return allreduce_hook(state, bucket)

        if dist.is_initialized():
            self.models.net.register_comm_hook(None, share)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizers.sgd, lambda step: 0.9**step)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        steps = 0
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                before = shared
                self.backward(self.losses.mse(self.models.net(batch["x"]), batch["x"].sum(dim=1)))
                updated = self.optimizer_step("sgd")
                if updated:
                    self.schedule.step()
                seen["shared"].append(shared - before)
                seen["updates"].append(updated)
                seen["global_steps"].append(self.global_step)
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
                if steps == self.cfg.fault_step:
                    raise ValueError("on purpose")
                steps += 1
            self.save_checkpoint(epoch=epoch)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.cfg.out.mkdir(exist_ok=True)
        (self.cfg.out / f"rank_{rank}.json").write_text(json.dumps(seen))
