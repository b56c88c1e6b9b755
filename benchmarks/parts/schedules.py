"""Schedules of pipelines: against torch's driven by hand, and the share of time that stages are idle against theory."""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from page import table
from torch import nn
from torch.distributed import pipelining

import mlx_runtime
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.strategies import strategy_of
from mlx_runtime.sections import Fragments

TITLE = "Schedules of pipelines"

SLEEP_S = 0.01
"""Time of a block that sleeps, for each of: forward, gradients of inputs, gradients of weights."""

WIDTH, BLOCKS, MICROBATCHES = 768, 8, 8
ROWS = 32, 128
"""Sizes of microbatches."""

HAND: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.second(self.first(x).relu())
        return made


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(SLEEP_S)
        return gradient, None


class Sleeping(nn.Module):
    """Takes as long on a busy machine as on an idle one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep: Any = _Sleep.apply
        made: torch.Tensor = sleep(x, SLEEP_S) * sleep(self.weight, 0.0)
        return made


def computing() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def sleeping() -> nn.Module:
    return nn.Sequential(*(Sleeping() for _ in range(BLOCKS)))


class Models:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


def section(rounds: int, only: Collection[str]) -> str:
    """Ignores `only`."""
    idle, quiet = [], os.getloadavg()[0] < (os.cpu_count() or 1) / 2
    ratios = _on_workers(2, _ratios, 10 * rounds)
    rows = [
        [f"{size}", f"`{kind}`", f"{1000 * hand:.0f} ms", f"{value:.3f}x ({low:.3f}-{high:.3f})", f"{cpu:.3f}x"]
        for (size, kind), (hand, (low, value, high), cpu) in ratios.items()
    ]
    computing = _computing(10 * rounds) if quiet else ""
    for stages in (2, 4):
        for kind, found in _on_workers(stages, _idle, rounds).items():
            idle.append([f"{stages}", f"`{kind}`", f"{100 * found:.1f} %", f"{100 * _theory(kind, stages):.1f} %"])
    return f"""Time of `self.forward_backward` against the same schedule of torch, driven by hand with the same blocks:
{BLOCKS} residual blocks of width {WIDTH} on two workers with one thread each, {MICROBATCHES} microbatches. Medians of
{10 * rounds} ratios of alternating steps, with the quartiles, and the ratio of the processor times of both workers
together, which other work on the machine affects less. Both begin without gradients, as after
`optimizer.zero_grad()`, and end with the loss on both workers. By hand, no generator is seeded, and the model is taken
apart: each worker has its blocks only.

{table(["rows of a microbatch", "schedule", "a step by hand", "time", "processor time"], rows)}

{computing}Share of a step in which a worker is idle: {BLOCKS} blocks that sleep instead of computing, so that other
load on the machine hardly matters, for {1000 * SLEEP_S:.0f} ms forward and twice as long backward. In theory, it is
(S - 1) / (M + S - 1) for S workers and M = {MICROBATCHES} microbatches; with two stages per worker, M counts twice; if
the gradients of weights fill bubbles, a worker waits for a third of that time only. Exchanges are on top.

{table(["workers", "schedule", "idle", "theory"], idle)}
"""


def _computing(rounds: int) -> str:
    """For machines without other work, which would also keep workers from computing."""
    rows = [
        [f"`{kind}`", *(f"{100 * item:.1f} %" for item in found), f"{100 * _theory(kind, 2):.1f} %"]
        for kind, found in _on_workers(2, _idle_computing, rounds).items()
    ]
    return f"""Share of a step in which a worker does not compute, as the time in which its process does not run, with
blocks like those above, microbatches of {ROWS[-1]} rows, and one core per worker: of the fastest of {rounds} steps.

{table(["schedule", "first worker", "second worker", "theory"], rows)}

"""


def _theory(kind: str, stages: int) -> float:
    rounds = MICROBATCHES * (2 if kind in ("interleaved", "zero_bubble") else 1)
    waits = (stages - 1) / (3 if kind == "zero_bubble" else 1)
    return waits / (rounds + waits)


def _on_workers(count: int, work: Callable[[int, int], Any], rounds: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        torch.multiprocessing.start_processes(
            _worked, (count, work, rounds, folder), nprocs=count, start_method="spawn"
        )
        return torch.load(Path(folder) / "found.pt", weights_only=False)


def _worked(rank: int, count: int, work: Callable[[int, int], Any], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    found = work(rank, rounds)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads can abort an interpreter that is finalizing


def _step(rank: int, kind: str, model: str, batch: torch.Tensor) -> Callable[[], None]:
    """Return a step of ours."""
    torch.manual_seed(0)
    cfg = mlx_runtime.TrainConfig(
        strategy="pipeline",
        fragments=Fragments(schedule=kind, microbatches=MICROBATCHES),  # type: ignore[arg-type]
    )
    size = dist.get_world_size()
    made: Any = strategy_of(cfg, Topology(rank, size, torch.device("cpu"), rank, size), None)
    net = made.build({"_target_": f"{__name__}.Models", "net": {"_target_": f"{__name__}.{model}"}}).net
    scale = torch.ones(())

    def step() -> None:
        net.zero_grad()
        if kind == "gpipe":
            net(batch).square().mean().backward()
        else:
            made.schedule.step(
                lambda part: (net(part["x"]).square().mean(), None),
                {"x": batch},
                scale=scale,
                factor=lambda weight: 1.0,
                metrics={},
            )

    return step


def _by_hand(rank: int, kind: str, batch: torch.Tensor) -> Callable[[], None]:
    """Return a step of torch."""
    torch.manual_seed(0)
    model, workers = list(computing().children()), dist.get_world_size()
    count = workers * (1 if kind == "1f1b" else 2)
    size = BLOCKS // count
    parts = {at: nn.Sequential(*model[at * size : (at + 1) * size]) for at in range(rank, count, workers)}
    stages: Any = [pipelining.PipelineStage(part, at, count, torch.device("cpu")) for at, part in parts.items()]
    schedule = HAND[kind](
        stages[0] if kind == "1f1b" else stages, MICROBATCHES, loss_fn=lambda output, _: output.square().mean()
    )

    def step() -> None:
        for part in parts.values():
            part.zero_grad()
        losses: list[torch.Tensor] = []
        given = (batch,) if rank == 0 else ()
        schedule.step(*given, target=batch, losses=losses, return_outputs=False)
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, workers - 1)  # with ours, all workers know it, too

    return step


def _ratios(rank: int, rounds: int) -> dict[tuple[int, str], tuple[float, list[float], float]]:
    """By rows and schedule: time of a step by hand, quartiles of ratios, ratio of processor times."""
    found = {}
    for rows, kind in itertools.product(ROWS, HAND):
        batch = _batch(rows)
        steps = _step(rank, kind, "computing", batch), _by_hand(rank, kind, batch)
        for _ in range(2):
            for step in steps:
                _timed(step)
        times = [[_timed(step) for step in steps] for _ in range(rounds)]
        ratios = statistics.quantiles([ours[0] / hand[0] for ours, hand in times], n=4)
        ours_cpu, hand_cpu = (statistics.median(float(pair[at][1].sum()) for pair in times) for at in range(2))
        found[rows, kind] = statistics.median(hand[0] for _, hand in times), ratios, ours_cpu / hand_cpu
    return found


def _idle_computing(rank: int, rounds: int) -> dict[str, list[float]]:
    """By schedule: the share of each worker."""
    found, batch = {}, _batch(ROWS[-1])
    for kind in ("gpipe", *HAND):
        step = _step(rank, kind, "computing", batch)
        _timed(step)
        wall, busy = min((_timed(step) for _ in range(rounds)), key=lambda item: item[0])
        found[kind] = (1 - busy / wall).tolist()
    return found


def _batch(rows: int) -> torch.Tensor:
    return torch.randn(MICROBATCHES * rows, WIDTH, generator=torch.Generator().manual_seed(0))


def _idle(rank: int, rounds: int) -> dict[str, float]:
    found, workers = {}, dist.get_world_size()
    busy = 3 * SLEEP_S * MICROBATCHES * BLOCKS / workers
    for kind in ("gpipe", *HAND):
        step = _step(rank, kind, "sleeping", torch.ones(MICROBATCHES, 4))
        _timed(step)
        found[kind] = 1 - busy / min(_timed(step)[0] for _ in range(rounds))
    return found


def _timed(step: Callable[[], None]) -> tuple[float, torch.Tensor]:
    """Return the time of a step, and the processor time of each worker, in seconds."""
    dist.barrier()
    started, cpu = time.perf_counter(), torch.zeros(dist.get_world_size(), dtype=torch.float64)
    before = time.process_time()
    step()
    cpu[dist.get_rank()] = time.process_time() - before
    dist.barrier()
    wall = time.perf_counter() - started
    dist.all_reduce(cpu)
    return wall, cpu
