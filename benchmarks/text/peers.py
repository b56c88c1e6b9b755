"""The same loop in plain torch: peers.py CONTENDER OUT, run with torchrun."""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler

from src.workload import BATCH, LEARNING_RATE, Clock, Net, Texts, step


def main(contender: str, out: Path) -> None:
    dataset, clock = Texts("longest" if contender == "longest" else "batch"), Clock()
    network = DistributedDataParallel(Net())
    optimizer = Adam(network.parameters(), LEARNING_RATE)
    sampler = DistributedSampler(dataset)
    if contender == "grouped":
        from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

        sampler = DistributedLengthGroupedSampler(BATCH, lengths=dataset.lengths)
    loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=dataset.collate)
    for batch in loader:
        step(network, optimizer, batch["tokens"])
        clock.count(batch["tokens"])
    if dist.get_rank() == 0:
        clock.write(out, len(dataset), dist.get_world_size())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()
