"""A small language model that reports what it was trained on, and the same loop in plain torch, to compare with."""

import contextlib
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torchmetrics
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, get_device, prepare_model

CONTEXT, VOCABULARY = 64, 256

WARM_UP = 10
"""Steps before speed and memory are measured."""


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "gpu"
    num_epochs: int = 2
    fault_step: int = field(default=-1, metadata={"resumable": True})  # at which rank 0 is killed, once
    out: Path = Path("found.json")


class Rows(Dataset):
    def __init__(self, rows: int = 48, batch_size: int = 4):
        self.batch_size = batch_size
        self.values = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(rows))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Stream(IterableDataset):
    """The same rows in a random order, by the random numbers of the process that reads them."""

    def __init__(self, rows: int = 48, batch_size: int = 4):
        self.batch_size, self.rows = batch_size, Rows(rows)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return map(self.rows.__getitem__, torch.randperm(len(self.rows)).tolist())

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, dim=-1)
        exact = torch.are_deterministic_algorithms_enabled()
        with sdpa_kernel(SDPBackend.MATH) if exact else contextlib.nullcontext():  # others may not be deterministic
            heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Datasets:
    train: Rows | Stream = Rows()


@dataclass
class Models:
    net: Net = Net()

    map_params_to_optimizers = {"net": "adam"}


@dataclass
class Optimizers:
    adam: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=1e-3)


@dataclass
class Losses:
    loss: torchmetrics.MeanMetric = torchmetrics.MeanMetric()


class Clock:
    """Measures the speed of steps after the first ones, and the peak memory of the GPU since then."""

    def __init__(self, device: torch.device):
        self._device, self.steps = device, 0

    def step(self):
        if self.steps == WARM_UP:
            self._synchronize()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._started = time.perf_counter()
        self.steps += 1

    def found(self):
        self._synchronize()
        on_gpu = self._device.type == "cuda"
        seconds = (time.perf_counter() - self._started) / max(1, self.steps - WARM_UP) if self.steps > WARM_UP else None
        return {"step_s": seconds, "peak_bytes": torch.cuda.max_memory_allocated(self._device) if on_gpu else 0}

    def _synchronize(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def loss_of(net, x):
    return nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def digest(weights):
    """Return a hash of all bits of a model, without what other stages of a pipeline hold."""
    held = [item for item in weights.values() if not item.is_meta]
    whole = (getattr(item, "full_tensor", lambda item=item: item)() for item in held)
    return hashlib.sha256(b"".join(item.cpu().contiguous().numpy().tobytes() for item in whole)).hexdigest()


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers
    losses: Losses

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        (train,) = self.generate_loaders(dataset_shards=dataset_shards)
        clock, losses = Clock(get_device()), []
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                clock.step()
                killed = self.cfg.out.with_suffix(".killed")
                if self.global_step == self.cfg.fault_step and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = loss_of(self.models.net, batch["x"])
                self.backward(loss)
                self.optimizer_step()
                losses.append(loss.detach())
                self.losses.loss.update(loss)
                self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)
            if epoch == self.cfg.num_epochs - 1:
                measured = clock.found()
            self.save_checkpoint(epoch, metrics={})
        about = {"digest": digest(self.models.net.state_dict()), "device": batch["x"].device.type}
        about |= {"losses": [item.item() for item in losses], "products": torch.get_float32_matmul_precision()}
        if torch.distributed.is_initialized():
            about |= {"backend": torch.distributed.get_backend_config(), "workers": torch.distributed.get_world_size()}
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self.cfg.out.write_text(json.dumps(about | measured))


def plain(device: str, width: int, layers: int, rows: int, batch_size: int, half: bool) -> None:
    """Train the same model in plain torch, and print what was measured."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    net, clock = Net(width, layers).to(device), Clock(device)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(Rows(rows), batch_size, shuffle=True, drop_last=True, pin_memory=device.type == "cuda")
    for _ in range(2):
        for x in loader:
            clock.step()
            x = x.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = loss_of(net, x)
            loss.backward()
            adam.step()
            adam.zero_grad()
    print(json.dumps(clock.found()))
