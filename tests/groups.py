"""Process groups for tests: run functions on several workers, without a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[int], Any]


def on_workers(
    works: Mapping[str, Work],
    folder: Path,
    world_size: int,
    preload: Sequence[str],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, list[Any]]:
    """Return the results of functions of a rank on each process, by name.

    Each has a process group of its own, of all processes or of the first of them: `sizes` says how many, by name.
    """
    torch.multiprocessing.set_forkserver_preload(list(preload))  # once for all processes
    arguments = (works, folder, world_size, sizes or {})
    torch.multiprocessing.start_processes(_worked, arguments, nprocs=world_size, start_method="forkserver")
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {name: [rank[name] for rank in ranks if name in rank] for name in works}


def _worked(rank: int, works: Mapping[str, Work], folder: Path, world_size: int, sizes: Mapping[str, int]) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, function in works.items():
        size = sizes.get(name, world_size)
        if rank >= size:
            continue
        store = dist.FileStore(str(folder / name), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found[name] = function(rank)
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")
