"""The training functions of the first design papers of Ray's distributed training, in today's spelling."""

import itertools
import os
import signal
import tempfile
import time
from pathlib import Path

import torch

from mlx_runtime import load_checkpoint, local_rank, report, save_checkpoint, world_rank, world_size


def with_epochs():
    for epoch in range(3):
        report(epoch=epoch, rank=world_rank())
    return world_rank(), world_size(), local_rank()


def resumable(config):
    checkpoint = load_checkpoint() or {}
    model = checkpoint.get("model", 0)
    for epoch in range(checkpoint.get("epoch", -1) + 1, config["num_epochs"]):
        model += epoch
        report(model=model)
        save_checkpoint(epoch=epoch, model=model)
        if epoch == config.get("fails_after"):
            raise ValueError("on purpose")
        if epoch == config.get("dies_after") and checkpoint == {}:
            os.kill(os.getpid(), signal.SIGKILL)
    return model


def of_torch_trainer(config):
    """A function for `TorchTrainer` of Ray Train."""
    import ray.train

    context, checkpoint, first = ray.train.get_context(), ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = torch.load(Path(folder, "part", "state.pt"))["epoch"] + 1
    for epoch in range(first, config["num_epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "part").mkdir()
            if context.get_world_rank() == 0:
                Path(folder, "empty").touch()
            torch.save({"epoch": epoch}, Path(folder, "part", "state.pt"))
            saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": 1.0 / (1 + epoch)}, checkpoint=saved)
    return first, context.get_world_size()


def endless():
    step = 0
    try:
        while True:
            report(step=step)
            step += 1
            time.sleep(0.05)
    finally:
        Path(f"left_{world_rank()}").touch()


def endless_with_checkpoints():
    for number in itertools.count():
        report(number=number)
        time.sleep(0.05)  # the stop is asked for here
        save_checkpoint(number=number)


def unpicklable():
    return lambda: None


def reports_text():
    report(loss="low")


def reports_on_rank_0():
    if world_rank() == 0:
        report(loss=1)


def two_arguments(config, model):
    pass


class Execution:
    def __init__(self, start, *, step=1):
        self.value, self.step = start, step

    def train(self):
        self.value += self.step
        total = torch.tensor([self.value + world_rank()])
        torch.distributed.all_reduce(total)
        return self.value, total.item()

    def fail_on_one(self):
        if world_rank() == 1:
            raise ValueError("on purpose")
        torch.distributed.barrier()
