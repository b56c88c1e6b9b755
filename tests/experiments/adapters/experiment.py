"""A frozen network with BatchNorm and LoRA adapters of peft, whose constructor builds the same weights each time.

Its epochs are 1 to cfg.num_epochs, although the runtime counts from 0.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, prepare_model
from mlx_runtime.losses import Mean


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "adapters"
    num_epochs: int = 3
    start_workers: int = 0


class Rows(Dataset):
    def __init__(self, rows: int = 24, batch_size: int = 8):
        self.batch_size = batch_size
        self.values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"x": self.values[index], "y": self.values[index].sum().sign() / 2 + 0.5}


class Net(nn.Module):
    def __init__(self, width: int = 256):
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.last(self.second(self.norm(self.first(x)).relu()).relu()).squeeze(1)


@dataclass
class Datasets:
    train: Rows = Rows()
    test: Rows = Rows(rows=9)


@dataclass
class Models:
    net: nn.Module = get_peft_model(Net(), LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False))

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=0.01, weight_decay=0.5)


@dataclass
class Losses:
    bce: Mean = Mean(nn.functional.binary_cross_entropy_with_logits)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def __init__(self, **groups):
        super().__init__(**groups)
        if self.optimizers:  # not in exports
            self.constant = LambdaLR(self.optimizers.adam, lambda step: 1)

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        train = self.generate_loaders(dataset_shards.train)
        for epoch in range(self.cfg.start_epoch or 1, self.cfg.num_epochs + 1):
            self.models.net.train()
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.backward(self.losses.bce(self.models.net(batch["x"]), batch["y"]))
                self.optimizer_step()
                self.constant.step()
                self.save_losses(batch_idx, epoch)
            self.save_checkpoint(epoch)

    def predict(self, batch):
        return {"y": self.models.net.base_model.model(batch["x"])}
