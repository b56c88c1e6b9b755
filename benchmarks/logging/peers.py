"""The other contenders, run under torchrun: torchrun --nproc-per-node 2 peers.py CONTENDER OUT"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from src.workload import BATCH, EPOCHS, EVERY, Clock, Net, Rows, forward, logs, make_metrics


def writer(clock: Clock) -> None:
    """A loop written by hand: values over all workers by TorchMetrics, written by torch's SummaryWriter."""
    from torch.utils.tensorboard import SummaryWriter

    dist.init_process_group("gloo")
    dataset, metrics = Rows(), make_metrics()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    network = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    tensorboard = SummaryWriter(tempfile.mkdtemp()) if dist.get_rank() == 0 else None
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for metric in metrics.values():
            metric.reset()
        clock.start()
        for inputs, labels in loader:
            forward(network, metrics, inputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if logs(epoch) and step % EVERY == 0:
                values = {name: metric.compute() for name, metric in metrics.items()}
                for name, value in values.items() if tensorboard is not None else ():
                    tensorboard.add_scalar(f"train/{name}", value, step)
        clock.stop(epoch)


def lightning(clock: Clock) -> None:
    """`self.log` of metrics: values per step with its TensorBoard logger, values per epoch over all workers."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.seen = Net(), torch.nn.ModuleDict(make_metrics())

        def training_step(self, batch, index):
            loss = forward(self.network, self.seen, *batch)
            if logs(self.current_epoch):
                for name, metric in self.seen.items():
                    self.log(f"train/{name}", metric, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_epoch_start(self):
            clock.start()

        def on_train_epoch_end(self):
            clock.stop(self.current_epoch)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=pl.loggers.TensorBoardLogger(tempfile.mkdtemp()),
        log_every_n_steps=EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Rows(), BATCH, shuffle=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = Clock()
    {"writer": writer, "lightning": lightning}[sys.argv[1]](measured)
    measured.write(Path(sys.argv[2]))
    dist.destroy_process_group()
