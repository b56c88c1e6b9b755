"""The other contenders, run under torchrun: torchrun --nproc-per-node 2 peers.py CONTENDER OUT"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from src.workload import Mlp, cases, make_dataset, measured, over_all_workers, train_step, write


def plain(num_workers: int, *, batched: bool = False) -> dict[str, float]:
    """DistributedDataParallel and DataLoader, as in the tutorials; `batched` indexes the dataset once per batch."""
    dist.init_process_group("gloo")
    rates = {}
    for data, model, batch_size in cases():
        dataset = make_dataset(data)
        sampler = DistributedSampler(dataset)
        if batched:
            loader = DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, batch_size, drop_last=False))
        else:
            loader = DataLoader(
                dataset, batch_size, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
            )
        step = _trained_by(data) if model == "mlp" else lambda batch: None

        def batches(epoch, sampler=sampler, loader=loader):
            sampler.set_epoch(epoch)
            return loader

        rates[f"{data} {model} {batch_size}"] = measured(batches, step)
    return rates


def _trained_by(data: str):
    network = DistributedDataParallel(Mlp(data))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    return lambda batch: train_step(network, optimizer, *batch)


def accelerate() -> dict[str, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rates = {}
    for data, model, batch_size in cases():
        loader = accelerator.prepare(DataLoader(make_dataset(data), batch_size, shuffle=True))
        step = lambda batch: None
        if model == "mlp":
            network = Mlp(data)
            network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))

            def step(batch, network=network, optimizer=optimizer):
                accelerator.backward(torch.nn.functional.cross_entropy(network(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()

        rates[f"{data} {model} {batch_size}"] = measured(lambda number, loader=loader: loader, step)
    return rates


def lightning() -> dict[str, float]:
    """Only with a model: without one, Lightning has no part in the loop."""
    import warnings

    import lightning.pytorch as pl

    warnings.simplefilter("ignore")

    class Module(pl.LightningModule):
        def __init__(self, data: str) -> None:
            super().__init__()
            self.network = Mlp(data)
            self.seconds, self.started, self.rows = 0.0, 0.0, 0

        def training_step(self, batch, index):
            self.rows += len(batch[1])
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:  # the first pass is a warm-up
                dist.barrier()
                self.rows, self.started = 0, time.perf_counter()

        def on_train_epoch_end(self):
            self.seconds = time.perf_counter() - self.started

    rates = {}
    for data, model, batch_size in cases():
        if model == "none":
            continue
        module = Module(data)
        epochs = 1 + max(1, batch_size // 128)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, barebones=True)
        trainer.fit(module, DataLoader(make_dataset(data), batch_size, shuffle=True))
        seconds, rows = over_all_workers(module.seconds, module.rows)
        rates[f"{data} {model} {batch_size}"] = rows / seconds
    return rates


if __name__ == "__main__":
    contenders = {
        "torchrun": lambda: plain(0),
        "torchrun-2": lambda: plain(2),
        "torchrun-batched": lambda: plain(0, batched=True),
        "accelerate": accelerate,
        "lightning": lightning,
    }
    torch.set_num_threads(1)
    write(Path(sys.argv[2]), contenders[sys.argv[1]]())
    dist.destroy_process_group()
