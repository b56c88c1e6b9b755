"""Process groups for tests: run functions on several workers, without a run."""

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forkserver import Commands

Work = Callable[[int], Any]


def on_workers(
    commands: Commands, works: Mapping[str, Work], folder: Path, world_size: int, sizes: Mapping[str, int] | None = None
) -> dict[str, list[Any]]:
    """Return the results of functions of a rank on each process, by name.

    Each has a process group of its own, of all processes or of the first of them: `sizes` says how many, by name.
    """
    (folder / "works.pkl").write_bytes(pickle.dumps((dict(works), world_size, sizes or {})))
    code = f"import sys; sys.path[:] = {sys.path}; import groups; groups.work_as({{}})"
    workers = [commands.start(folder, [], commands.environment, code.format(rank)) for rank in range(world_size)]
    try:
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.kill()
    assert not any(codes), "\n".join(worker.communicate()[1] for worker in workers)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {name: [rank[name] for rank in ranks if name in rank] for name in works}


def work_as(rank: int) -> None:
    torch.set_num_threads(1)
    works, world_size, sizes = pickle.loads(Path("works.pkl").read_bytes())
    found = {}
    for name, function in works.items():
        size = sizes.get(name, world_size)
        if rank >= size:
            continue
        store = dist.FileStore(name, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found[name] = function(rank)
        dist.destroy_process_group()
    torch.save(found, f"{rank}.pt")
