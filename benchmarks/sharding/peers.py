"""The other contenders, run under torchrun: torchrun --nproc-per-node 2 peers.py CONTENDER SETTINGS, which are JSON."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from src.workload import CHECKPOINTS, LEARNING_RATE, Gpt, Record, Tokens, step


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        layers: number of blocks.
        width: width of the model.
        rows: number of rows of the dataset.
        batch_size: rows per worker and step.
        checkpoint: save and restore a checkpoint after the steps.
        out: file for the measurements.
    """

    layers: int
    width: int
    rows: int
    batch_size: int
    checkpoint: bool
    out: str

    def folder(self, number: int) -> Path:
        return Path(self.out).parent / f"checkpoint-{number}"

    @property
    def last(self) -> Path:
        return self.folder(CHECKPOINTS - 1)

    def model(self) -> Gpt:
        return Gpt(self.layers, self.width)

    def dataset(self) -> Tokens:
        return Tokens(self.rows, self.batch_size)


def plain(settings: Settings) -> None:
    """`fully_shard` per block on the meta device, and asynchronous checkpoints, as in the tutorials of torch."""
    dist.init_process_group("gloo")
    mesh, record = init_device_mesh("cpu", (dist.get_world_size(),)), Record()
    with torch.device("meta"):
        network = settings.model()
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh)
    network.to_empty(device="cpu")
    network.init_weights()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    dataset = settings.dataset()
    for tokens, targets in DataLoader(dataset, settings.batch_size, sampler=DistributedSampler(dataset)):
        step(network, optimizer, tokens, targets)
        record.tick()
    record.trained()

    def state() -> dict:
        weights, moments = get_state_dict(network, optimizer)
        return {"weights": weights, "moments": moments}

    def save(number: int) -> Callable[[], object]:
        return dcp.async_save(state(), checkpoint_id=settings.folder(number)).result

    def restore() -> None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=settings.last)
        set_state_dict(network, optimizer, model_state_dict=loaded["weights"], optim_state_dict=loaded["moments"])

    if settings.checkpoint:
        record.checkpoints(save, restore)
    record.write(Path(settings.out))


def accelerate(settings: Settings) -> None:
    """FSDP2 by `prepare`, and `save_state`, which waits until everything is written."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator, record = Accelerator(cpu=True), Record()
    # Accelerate selects FSDP only where it finds GPUs; this is what it then sets.
    accelerator.state.fsdp_plugin = plugin
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    network = settings.model()
    network.init_weights()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    loader = DataLoader(settings.dataset(), settings.batch_size, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for tokens, targets in loader:
        accelerator.backward(network(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        record.tick()
    record.trained()

    def save(number: int) -> Callable[[], object]:
        accelerator.save_state(settings.folder(number))
        return lambda: None

    if settings.checkpoint:
        record.checkpoints(save, lambda: accelerator.load_state(settings.last))
    record.write(Path(settings.out))


def lightning(settings: Settings) -> None:
    """`ModelParallelStrategy` with `fully_shard` in `configure_model`, and its distributed checkpoints."""
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    warnings.simplefilter("ignore")
    record = Record()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.network = settings.model()

        def configure_model(self):
            for part in (*self.network.blocks, self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.network(*batch)

        def on_train_batch_end(self, outputs, batch, index):
            record.tick()

        def on_train_end(self):
            record.trained()
            if settings.checkpoint:
                record.checkpoints(self.save, lambda: self.trainer.strategy.load_checkpoint(settings.last))
            record.write(Path(settings.out))

        def save(self, number: int) -> Callable[[], object]:
            self.trainer.save_checkpoint(settings.folder(number))
            return lambda: None

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), LEARNING_RATE)

    workers = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=workers, tensor_parallel_size=1)
    trainer = pl.Trainer(accelerator="cpu", devices=workers, strategy=strategy, max_epochs=1, barebones=True)
    trainer.fit(Module(), DataLoader(settings.dataset(), settings.batch_size, shuffle=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contenders = {"plain": plain, "accelerate": accelerate, "lightning": lightning}
    contenders[sys.argv[1]](Settings(**json.loads(sys.argv[2])))
    dist.destroy_process_group()
    os._exit(0)  # everything is written; threads that are still running may abort the exit of the interpreter
