"""Small sharded models on groups of gloo workers, saved and restored. Run as a script, it stores each stage's results.

The workers are forks of this process, which has imported the libraries once and computes nothing itself.
"""

import itertools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from mlx_runtime.companions.sharding import saving
from mlx_runtime.companions.sharding.layouts import Layouts
from mlx_runtime.companions.sharding.saving import Parts
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.runs.checkpoints.groups import load_into, state_of
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import PARTS, BackgroundSaver, CheckpointStore

GROUPS = ("models", "optimizers", "tools")

saving.PIECE_BYTES = 60  # two rows of the weights are a piece


class Net(nn.Module):
    """Tied weights, buffers, and sizes that no number of workers divides; some workers have no part of the biases."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(self.norm(hidden)).mean() + self.last(hidden).square().mean()


class Best:
    """A tool like the template's `BestWeights`."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, model: nn.Module) -> None:
        self.weights = {name: item.to("cpu", copy=True) for name, item in model.state_dict().items()}


def experiment(strategy: str, *, width: int = 6) -> SimpleNamespace:
    """Groups like those of an experiment: the same values whatever the strategy."""
    torch.manual_seed(0)
    net = Net(width)
    if strategy != "ddp":
        size = dist.get_world_size()
        mesh = (
            init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
            if strategy == "fsdp"
            else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        )
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return SimpleNamespace(
        models=SimpleNamespace(net=net),
        optimizers=SimpleNamespace(main=optimizer),
        tools=SimpleNamespace(best=Best(), average=AveragedModel(nn.Linear(1, 1)), count=SimpleNamespace(seen=0)),
    )


def trained(groups: SimpleNamespace, steps: int = 3) -> SimpleNamespace:
    """Every worker sees the same rows, so that their number does not matter."""
    net, optimizer = groups.models.net, groups.optimizers.main
    generator = torch.Generator().manual_seed(groups.tools.count.seen)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(7, (8,), generator=generator)).backward()
        optimizer.step()
        groups.tools.count.seen += 1
    groups.tools.best.update(net)
    return groups


def values(groups: SimpleNamespace) -> dict[str, Any]:
    """Everything that is checkpointed, as whole tensors."""

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.full_tensor().clone()
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return [whole(item) for item in value] if isinstance(value, list | tuple) else value

    return {name: whole(state_of(getattr(groups, name))[0]) for name in GROUPS}


def saver_of(root: Path | str) -> BackgroundSaver:
    return BackgroundSaver(CheckpointStore(str(root)), lambda checkpoint: None, lambda: None)


def save(saver: BackgroundSaver, groups: SimpleNamespace, epoch: int = 0) -> None:
    """Save as the checkpointer of a run does, in the background."""
    parts, rank = Parts(), dist.get_rank()
    states = {name: parts.without(state_of(getattr(groups, name))[0], name) for name in GROUPS}
    rest = dict.fromkeys(PARTS) | {"epoch": epoch} | states
    if parts.tensors:
        saver.save(rest if rank == 0 else None, CheckpointInfo(epoch, True, 3, {}), parts)
    elif rank == 0:
        saver.save(rest, CheckpointInfo(epoch, True, 3, {}))
    saver.wait()
    dist.barrier()


def restore(root: Path | str, groups: SimpleNamespace) -> SimpleNamespace:
    saved = CheckpointStore(str(root))
    checkpoint = saved.all()[-1]
    state = saved.load(checkpoint, whole=False)
    layouts = Layouts(vars(groups.models), whole=checkpoint.index is None)
    made = {
        name: {
            item: layouts.of_member(getattr(getattr(groups, name), item), part) for item, part in state[name].items()
        }
        for name in GROUPS
    }
    layouts.reads.run()
    for name in GROUPS:
        load_into(getattr(groups, name), made[name], name, owned=True)
    return groups


def saved_by(strategy: str, root: Path) -> dict[str, Any]:
    groups = trained(experiment(strategy))
    save(saver_of(root), groups)
    found = {"saved": values(groups)}
    return found | {"continued": values(trained(groups))}


def restored_by(strategy: str, root: Path, *, again: Path | None = None) -> dict[str, Any]:
    """Restore, and train on."""
    groups = restore(root, experiment(strategy))
    found: dict[str, Any] = {"restored": values(groups)}
    if again is not None:
        save(saver_of(again), groups)
    groups.models.net.load_state_dict(groups.tools.best.weights)
    return found | {"continued": values(trained(groups))}


def misfit(strategy: str, root: Path) -> str:
    """Return the error of a restore into a model of another width."""
    try:
        restore(root, experiment(strategy, width=4))
    except ConfigError as error:
        return str(error)
    return "none"


def uneven(root: Path) -> str:
    """Return the error if only rank 0 keeps weights."""
    groups = experiment("fsdp")
    if dist.get_rank() == 0:
        groups.tools.best.update(groups.models.net)
    try:
        save(saver_of(root), groups)
    except MlxError as error:
        return str(error)
    return "none"


def stages(root: Path) -> dict[str, tuple[int, Callable[[], dict[str, Any]]]]:
    """The number of workers, and what each of them does, in order."""
    two, four, whole = (root / name for name in ("two", "four", "whole"))
    return {
        "saved": (2, lambda: saved_by("fsdp", two)),
        "same": (2, lambda: restored_by("fsdp", two) | {"misfit": misfit("fsdp", two)}),
        "hybrid": (4, lambda: restored_by("hsdp", two, again=four)),
        "three": (3, lambda: restored_by("fsdp", four)),
        "one": (1, lambda: restored_by("ddp", two, again=whole)),
        "from whole": (2, lambda: restored_by("fsdp", whole) | {"uneven": uneven(root / "uneven")}),
    }


def started(size: int, work: Callable[[], Any], folder: Path) -> list[int]:
    """Start workers, which keep what the work returns in the folder. Return their process ids by rank."""
    folder.mkdir(parents=True)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(folder / "store"), size)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
                torch.save(work(), folder / f"{rank}.pt")
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        pids.append(pid)
    return pids


def exit_codes(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def save_forever(root: Path) -> None:
    """Save again and again, replacing older checkpoints, until a worker is killed."""
    groups, saver = trained(experiment("fsdp")), saver_of(root)
    for number in itertools.count():
        save(saver, groups, number % 3)
        if dist.get_rank() == 0:
            print(number, flush=True)


def main(root: Path) -> None:
    results = {}
    for name, (size, work) in stages(root).items():
        folder = root / "of" / name
        if any(codes := exit_codes(started(size, work, folder))):
            sys.exit(f"{name}: exit codes {codes}")
        results[name] = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]
    torch.save(results, root / "results.pt")


def replaced(uri: str) -> dict[str, Any]:
    """Save at a URI, replace the checkpoint, and restore it."""
    groups, saver = trained(experiment("fsdp")), saver_of(uri)
    save(saver, groups)
    save(saver, trained(groups))
    return {"saved": values(groups), "restored": values(restore(uri, experiment("fsdp")))}


def at_uri(root: Path) -> None:
    """Do this in a group of two, with the URI on stdin."""
    uri = sys.stdin.read()
    sys.exit(any(exit_codes(started(2, lambda: replaced(uri), root / "uri"))))


def kills(root: Path) -> None:
    """Start a group that saves for each line on stdin, print its process ids, and wait for its end."""
    for number, _ in enumerate(iter(sys.stdin.readline, "")):
        pids = started(2, lambda: save_forever(root / "checkpoints"), root / str(number))
        print(*pids, flush=True)
        print("ended", *exit_codes(pids), flush=True)


if __name__ == "__main__":
    {"main": main, "kills": kills, "at_uri": at_uri}[sys.argv[1]](Path(sys.argv[2]))
