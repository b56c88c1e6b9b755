"""The local engine: workers are processes on this machine, forked from the driver."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, WorkerLostError
from mlx_runtime.loop.job import Cluster, Handle, StopAsked, backend_of
from mlx_runtime.settings import Settings
from mlx_runtime.workers.children import exit_reason, memory_kills, unsafe_to_fork
from mlx_runtime.workers.fork_server import ForkServer
from mlx_runtime.workers.output import Output
from mlx_runtime.workers.placement import changing_size, this_machine
from mlx_runtime.workers.recovery import RestartingGroup, WorkerDied
from mlx_runtime.workers.scratch import Scratch

EXIT_S = 10.0
"""Time for a worker to exit after it has finished or was killed."""

NODE_NAME = "MLX_NODE"
"""Environment variable of workers with the name of their machine, if it has one."""

RAY_TRAIN = ("mlx_runtime.companions.ray.private_train",)
"""Module that workers import if the experiment has imported Ray Train."""

_warm_server: ForkServer | None = None
"""Server started by `warm_up` and not yet used by a run."""


def warm_up(*modules: str) -> None:
    """Start the fork server early, right after the driver has imported the experiment and while forking is safe.

    With the `modules` of the experiment, it starts even if forking is not safe, as a new interpreter that imports them.
    This pays off if several processes are started.
    """
    global _warm_server
    if _warm_server is not None or Settings.read().spawn:
        return
    if not unsafe_to_fork():
        _warm_server = ForkServer()
    elif modules:
        _warm_server = ForkServer(fresh=True)
        _warm_server.preload(*modules)


def take_server() -> ForkServer:
    """Return the server of `warm_up`, or a new one."""
    global _warm_server
    server, _warm_server = _warm_server or ForkServer(), None
    return server


def cool_down() -> None:
    """Close the server of `warm_up` if no run has used it."""
    if _warm_server is not None:
        take_server().close()


class Local:
    """The engine for one machine."""

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> str | None:
        return "its workers are processes of one machine, not of a cluster" if in_job else changing_size(cfg)

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Iterator[Cluster]:
        yield this_machine(cfg, "local engine")

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        from mlx_runtime.loop.strategies.selection import strategy_class

        self.cfg, self.use_gpu, self.timeout_s = cfg, cluster.use_gpu, timeout_s
        self.server = take_server()
        self.server.preload(*strategy_class(cfg.strategy).preloads, *(RAY_TRAIN if "ray.train" in sys.modules else ()))

    @property
    def notice(self) -> str | None:
        why = self.server.spawns
        return f"started as new interpreters, which takes longer than forking: {why}" if why else None

    def start(self, job: Any, handle: Handle, stop_asked: StopAsked) -> "LocalGroup":
        return LocalGroup(self, job, handle)

    def close(self) -> None:
        self.server.close()


class LocalGroup(RestartingGroup):
    """The workers of a run, processes of this machine."""

    def __init__(self, engine: Local, job: Any, handle: Handle) -> None:
        super().__init__(engine.cfg, handle)
        self._engine, self._job = engine, job
        self._ranks = range(engine.cfg.start_workers)
        self._scratch = Scratch("mlx-local-")
        self._output = Output(job.folder, len(self._ranks))
        self._attempt: Attempt | None = None
        self._number = -1  # of the attempt
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        from mlx_runtime.workers.process import load_results

        attempt = self._attempt
        assert attempt is not None, "it was started"
        self._collect_exits(attempt)
        self._forward_output()
        died = {rank: ProcessDied(rank, code, attempt.starved) for rank, code in attempt.codes.items()}
        # Stored results are more specific than exit codes.
        ended = {**died, **attempt.lost, **load_results(attempt.results)}
        errors = {rank: error for rank in self._ranks if (error := ended.get(rank)) is not None}
        if errors:
            self.handle_failure(errors, all_ended=len(attempt.codes) == len(self._ranks))
        elif len(ended) == len(self._ranks):  # user code may keep a process from exiting
            attempt.finished_at = attempt.finished_at or time.monotonic()
            return len(attempt.codes) < len(self._ranks) and time.monotonic() - attempt.finished_at <= EXIT_S
        return True

    def waits_for(self) -> str | None:
        return None

    def close(self) -> None:
        with contextlib.suppress(MlxError):
            self._kill()
        self._output.close()
        self._forward_output()
        self._scratch.close()

    def _start(self) -> None:
        # Each attempt gets a new store, because the old one contains addresses of lost workers.
        results = self._begin_attempt()
        self._start_here(self._ranks, results / "store")

    def _begin_attempt(self) -> Path:
        """Return the folder for the results of a new attempt."""
        self._number += 1
        results = self._scratch.path / str(self._number)
        results.mkdir()
        self._attempt = Attempt(results)
        return results

    def _start_here(self, ranks: range, store: Any, host: str | None = None, name: str | None = None) -> None:
        """Start the workers of this machine; `store` and `host` are those of a `WorkerJob`."""
        from mlx_runtime.workers.process import WorkerJob

        engine, attempt = self._engine, self._attempt
        assert attempt is not None, "it has begun"
        backend = backend_of(use_gpu=engine.use_gpu)
        shared = WorkerJob(
            self._job, len(self._ranks), backend, engine.timeout_s, attempt.results, store, host, ranks.start
        )
        streams = {rank: self._output.writers[rank] for rank in ranks}
        threads = engine.cfg.cpus_per_worker
        start_workers(engine.server, shared, streams, attempt=self._number, threads=threads, name=name)

    def _kill(self) -> None:
        left = ", ".join(map(str, self._killed()))
        if left:
            raise WorkerLostError(f"rank {left} is still running {EXIT_S:.0f} s after SIGKILL and cannot be replaced")

    def _killed(self) -> list[int]:
        """Kill all workers. Return the ranks of those that are still running `EXIT_S` later."""
        attempt = self._attempt
        if attempt is None:
            return []
        self._engine.server.kill(*self._ranks)
        until = time.monotonic() + EXIT_S
        while len(attempt.codes) < len(self._ranks) and time.monotonic() < until:
            self._collect_exits(attempt, timeout_s=0.1)
        return [rank for rank in self._ranks if rank not in attempt.codes]

    def _collect_exits(self, attempt: "Attempt", timeout_s: float = 0.0) -> None:
        attempt.codes.update(self._engine.server.exits(timeout_s))

    def _forward_output(self) -> None:
        for event in self._output.lines():
            self._handle(event)


def start_workers(
    server: ForkServer,
    shared: Any,
    streams: Mapping[int, Any],
    *,
    attempt: int,
    threads: int,
    node: int = 0,
    name: str | None = None,
) -> None:
    """Start the workers of one machine, given a `WorkerJob` and their stdout and stderr by rank.

    They get torchrun's variables, except those of its store, because every user of the machine could open it, and the
    `name` of the machine.
    """
    from mlx_runtime.workers.process import run_worker

    for local_rank, rank in enumerate(streams):
        changed: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "NODE_RANK": node,
            "GROUP_RANK": node,
            "WORLD_SIZE": shared.world_size,
            "LOCAL_WORLD_SIZE": len(streams),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        if "nccl" not in shared.backend:
            changed["CUDA_VISIBLE_DEVICES"] = ""
        elif (own := int(shared.job.cluster.gpus_per_worker)) > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(own * len(streams))))
            changed["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[own * local_rank : own * (local_rank + 1)])
        if name is not None:
            changed[NODE_NAME] = name
        variables = {**os.environ, **{key: str(value) for key, value in changed.items()}}
        server.start(rank, partial(run_worker, shared, rank), variables, streams[rank])


@dataclass
class Attempt:
    """The processes of a group from one start to the next."""

    results: Path  # folder with the result or error of each worker
    codes: dict[int, int] = field(default_factory=dict)  # exit codes by rank
    lost: dict[int, BaseException] = field(default_factory=dict)  # workers of lost machines, by rank
    memory_kills: int = field(default_factory=memory_kills)  # before the attempt
    finished_at: float | None = None

    @property
    def starved(self) -> bool:
        """True if the kernel has killed a process to free memory."""
        return memory_kills() > self.memory_kills


class ProcessDied(WorkerDied):
    """A worker ended without storing a result."""

    def __init__(self, rank: int, code: int, starved: bool) -> None:
        super().__init__(f"rank {rank} {exit_reason(code, starved=starved)}", starved and code == -signal.SIGKILL)
