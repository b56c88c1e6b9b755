"""The other contenders: peers.py CONTENDER OUT, run with python, torchrun or `accelerate launch`."""

import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from src.workload import BATCH, CLASSES, LEARNING_RATE, CrossEntropy, Images, Net, stepped


def plain(out: Path) -> None:
    """One process."""
    network = Net()
    loader = DataLoader(Images(), BATCH, shuffle=True)
    train(network, torch.optim.Adam(network.parameters(), LEARNING_RATE), loader, torch.Tensor.backward, out)


def torchrun(out: Path) -> None:
    """DistributedDataParallel and DataLoader, as in the tutorials."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    network, dataset = DistributedDataParallel(Net()), Images()
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    train(network, torch.optim.Adam(network.parameters(), LEARNING_RATE), loader, torch.Tensor.backward, out)


def accelerate(out: Path) -> None:
    from accelerate import Accelerator

    accelerator, network = Accelerator(cpu=True), Net()
    optimizer, loader = torch.optim.Adam(network.parameters(), LEARNING_RATE), DataLoader(Images(), BATCH, shuffle=True)
    assert accelerator.num_processes == 2
    train(*accelerator.prepare(network, optimizer, loader), accelerator.backward, out)


def train(network, optimizer, loader, backward, out: Path) -> None:
    """Train one epoch, print its metrics over all workers, and save the weights on rank 0."""
    cross_entropy, accuracy = CrossEntropy(), MulticlassAccuracy(CLASSES)
    for images, labels in loader:
        logits = network(images)
        backward(cross_entropy(logits, labels))
        optimizer.step()
        optimizer.zero_grad()
        accuracy.update(logits.detach(), labels)
        stepped(out)
    print(f"cross_entropy {cross_entropy.compute():.4f} accuracy {accuracy.compute():.4f}")
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(tempfile.mkdtemp(dir=out.parent)) / "state.pt")


def lightning(out: Path) -> None:
    """Lightning with its defaults, including its logger and checkpoint, but without its progress bar."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.cross_entropy, self.accuracy = Net(), CrossEntropy(), MulticlassAccuracy(CLASSES)

        def training_step(self, batch, index):
            images, labels = batch
            logits = self.network(images)
            loss = self.cross_entropy(logits, labels)
            self.accuracy.update(logits.detach(), labels)
            self.log("cross_entropy", self.cross_entropy, on_step=False, on_epoch=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            stepped(out)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), LEARNING_RATE)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        default_root_dir=out.parent,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Images(), BATCH, shuffle=True))


if __name__ == "__main__":
    contenders = {"plain": plain, "torchrun": torchrun, "accelerate": accelerate, "lightning": lightning}
    contenders[sys.argv[1]](Path(sys.argv[2]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
