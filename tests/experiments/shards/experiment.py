"""A small transformer, which is trained by the same loop under every strategy."""

import json
from dataclasses import dataclass
from pathlib import Path

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
    name: str = "shards"
    num_epochs: int = 2
    out: Path = Path("seen")


class Tokens(Dataset):
    def __init__(self, rows: int = 32, batch_size: int = 4):
        self.batch_size = batch_size
        self.values = torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Block(nn.Module):
    """Causal attention with three heads, and an MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (9, -1)).transpose(1, 2).chunk(3, dim=1)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    """Its head is tied to its embedding, its width is odd, and it has a buffer that is not saved."""

    def __init__(self, width: int = 15, layers: int = 3, classes: int = 32):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(width), persistent=False)
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Datasets:
    train: Tokens = Tokens()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=0.01)


@dataclass
class Losses:
    loss: torchmetrics.MeanMetric = torchmetrics.MeanMetric()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def predict(self, batch):
        return {"next": self.models.net(batch["x"][:, :-1])[:, -1]}

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        losses = []
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                logits = self.models.net(batch["x"][:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())
                self.backward(loss)
                self.optimizer_step()
                shared = loss.detach().clone()
                if dist.is_initialized():
                    dist.all_reduce(shared, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
                    shared /= dist.get_world_size()
                losses.append(shared.item())
                self.losses.loss.update(loss)
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
        weights = {
            name: getattr(item, "full_tensor", lambda item=item: item)()
            for name, item in self.models.net.state_dict().items()
        }
        self.cfg.out.mkdir(exist_ok=True)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(weights, self.cfg.out / "weights.pt")
            (self.cfg.out / "losses.json").write_text(json.dumps(losses))
