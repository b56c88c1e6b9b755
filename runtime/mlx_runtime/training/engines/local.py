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

from mlx_runtime.errors import MlxError, WorkerLostError, short_message
from mlx_runtime.events import WorkersLost
from mlx_runtime.settings import Settings
from mlx_runtime.training.engines.base import Cluster, Handle, StopAsked, backend_of, lost
from mlx_runtime.training.engines.output import Output
from mlx_runtime.training.engines.placement import changing_size, this_machine
from mlx_runtime.training.engines.scratch import Scratch
from mlx_runtime.training.processes import ForkServer, exit_reason, memory_kills, unsafe_to_fork

ORIGIN_S = 3.0
"""Time to wait for the cause when a worker reports only that it lost another one."""

UNWIND_S = 5.0
"""Time for the other workers to end after user code failed on one; they may be saving a checkpoint."""

EXIT_S = 10.0
"""Time for a worker to exit after it has finished or was killed."""

RAY = ("mlx_runtime.companions.ray.private",)
"""Module that workers import if the experiment has imported Ray."""

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
        from mlx_runtime.training.strategies import strategy_class

        self.cfg, self.use_gpu, self.timeout_s = cfg, cluster.use_gpu, timeout_s
        self.server = take_server()
        self.server.preload(*strategy_class(cfg.strategy).preloads, *(RAY if "ray" in sys.modules else ()))

    @property
    def notice(self) -> str | None:
        why = self.server.spawns
        return f"started as new interpreters, which takes longer than forking: {why}" if why else None

    def start(self, job: Any, handle: Handle, stop_asked: StopAsked) -> "LocalGroup":
        return LocalGroup(self, job, handle)

    def close(self) -> None:
        self.server.close()


class LocalGroup:
    """The workers of a run. If one of them is lost, all are restarted from the last checkpoint."""

    def __init__(self, engine: Local, job: Any, handle: Handle) -> None:
        self._engine, self._job, self._handle = engine, job, handle
        self._ranks = range(engine.cfg.start_workers)
        self._scratch = Scratch("mlx-local-")
        self._output = Output(job.folder, len(self._ranks))
        self._failures = 0
        self._attempt: Attempt | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        from mlx_runtime.training.engines.worker import load_results

        attempt = self._attempt
        assert attempt is not None, "it was started"
        self._collect_exits(attempt)
        self._forward_output()
        died = {rank: ProcessDied(rank, code, attempt.starved) for rank, code in attempt.codes.items()}
        # Stored results are more specific than exit codes.
        ended = {**died, **attempt.lost, **load_results(attempt.results)}
        errors = {rank: error for rank in self._ranks if (error := ended.get(rank)) is not None}
        if errors:
            self._handle_failure(attempt, errors)
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
        results = self._scratch.path / str(self._failures)
        results.mkdir()
        self._attempt = Attempt(results)
        return results

    def _start_here(self, ranks: range, store: Any, host: str | None = None) -> None:
        """Start the workers of this machine; `store` and `host` are those of a `WorkerJob`."""
        from mlx_runtime.training.engines.worker import WorkerJob

        engine, attempt = self._engine, self._attempt
        assert attempt is not None, "it has begun"
        backend = backend_of(use_gpu=engine.use_gpu)
        shared = WorkerJob(
            self._job, len(self._ranks), backend, engine.timeout_s, attempt.results, store, host, ranks.start
        )
        streams = {rank: self._output.writers[rank] for rank in ranks}
        start_workers(engine.server, shared, streams, attempt=self._failures, threads=engine.cfg.cpus_per_worker)

    def _handle_failure(self, attempt: "Attempt", errors: dict[int, BaseException]) -> None:
        """Raise the error of user code once the other workers have ended, or replace lost workers."""
        attempt.failed_at = attempt.failed_at or time.monotonic()
        failed_s = time.monotonic() - attempt.failed_at
        origins = {rank: error for rank, error in errors.items() if not isinstance(error, WorkerLostError)}
        of_users = [error for error in origins.values() if isinstance(error, MlxError)]
        if of_users:
            if len(attempt.codes) == len(self._ranks) or failed_s > UNWIND_S:
                raise of_users[0]
        elif origins or failed_s >= ORIGIN_S:
            self._replace(origins or errors)

    def _replace(self, errors: dict[int, BaseException]) -> None:
        from mlx_runtime.training.loop import ways_to_save

        first, cfg = next(iter(errors.values())), self._engine.cfg
        why = short_message(first)
        if 0 <= cfg.elastic.max_failures <= self._failures:
            starved = isinstance(first, ProcessDied) and first.starved
            raise lost(why, cfg.elastic.max_failures, ways_to_save(cfg) if starved else "")
        self._handle(WorkersLost(tuple(errors), why))
        left = ", ".join(map(str, self._kill()))
        if left:
            raise WorkerLostError(f"rank {left} is still running {EXIT_S:.0f} s after SIGKILL and cannot be replaced")
        self._failures += 1
        self._start()

    def _kill(self) -> list[int]:
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
    server: ForkServer, shared: Any, streams: Mapping[int, Any], *, attempt: int, threads: int, node: int = 0
) -> None:
    """Start the workers of one machine, given a `WorkerJob` and their stdout and stderr by rank.

    They get torchrun's variables, except those of its store, because every user of the machine could open it.
    """
    from mlx_runtime.training.engines.worker import run_worker

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
        variables = {**os.environ, **{name: str(value) for name, value in changed.items()}}
        server.start(rank, partial(run_worker, shared, rank), variables, streams[rank])


@dataclass
class Attempt:
    """The processes of a group from one start to the next."""

    results: Path  # folder with the result or error of each worker
    codes: dict[int, int] = field(default_factory=dict)  # exit codes by rank
    lost: dict[int, BaseException] = field(default_factory=dict)  # workers of lost machines, by rank
    memory_kills: int = field(default_factory=memory_kills)  # before the attempt
    failed_at: float | None = None
    finished_at: float | None = None

    @property
    def starved(self) -> bool:
        """True if the kernel has killed a process to free memory."""
        return memory_kills() > self.memory_kills


class ProcessDied(Exception):  # noqa: N818 - describes a worker, not an error of this process
    """A worker ended without storing a result."""

    def __init__(self, rank: int, code: int, starved: bool) -> None:
        super().__init__(f"rank {rank} {exit_reason(code, starved=starved)}")
        self.starved = starved and code == -signal.SIGKILL
