"""The same loop in plain torch: peers.py THREADS OUT, run with python or torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from src.workload import BATCH, LEARNING_RATE, Clock, Gpt, Text, step


def main(out: Path) -> None:
    network, dataset, sampler, clock = Gpt(), Text(), None, Clock()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        network, sampler = DistributedDataParallel(network), DistributedSampler(dataset)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    for codes, targets in DataLoader(dataset, BATCH, shuffle=sampler is None, sampler=sampler):
        step(network, optimizer, codes, targets)
        clock.tick()
    clock.write(out)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main(Path(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
