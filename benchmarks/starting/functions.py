"""The same training function with the `Trainer` of mlx and with Ray's own: functions.py CONTENDER OUT."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from src.workload import BATCH, LEARNING_RATE, CrossEntropy, Images, Net, stepped


def train_func(config: dict[str, Any]) -> None:
    """Train for one epoch, and report its loss. Both libraries have set up the process group."""
    network, dataset, losses = DistributedDataParallel(Net()), Images(), CrossEntropy()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    for images, labels in DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset)):
        optimizer.zero_grad()
        losses(network(images), labels).backward()
        optimizer.step()
        stepped(Path(config["out"]))
    loss = losses.compute().item()
    if config["trainer"] == "ray":
        import ray.train

        ray.train.report({"loss": loss})
    else:
        from mlx_runtime import report

        report(loss=loss)


def ray(out: str, address: str | None = "local") -> None:
    """Ray's `TorchTrainer`, by default in an embedded Ray."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    embedded = {"num_cpus": max(2, os.cpu_count() or 1), "include_dashboard": False} if address else {}
    ray.init(address=address, **embedded)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train_func,
            train_loop_config={"trainer": "ray", "out": out},
            torch_config=TorchConfig("gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    ray.shutdown()


def mlx(engine: str, out: str) -> None:
    from mlx_runtime import Trainer

    Trainer(num_workers=2, engine=engine, use_gpu=False).run(train_func, {"trainer": "mlx", "out": out})


if __name__ == "__main__":
    contender, written = sys.argv[1:]
    if contender.startswith("ray"):
        ray(written, address="local" if contender == "ray" else None)
    else:
        mlx(contender.removeprefix("mlx-"), written)
