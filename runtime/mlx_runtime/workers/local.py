"""The local engine: workers are processes on this machine, forked from the driver."""

import codecs
import contextlib
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, WorkerLostError
from mlx_runtime.events import WorkerOutput
from mlx_runtime.loop.job import Cluster, Handle, StopAsked, backend_of
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import LogFile, log_name
from mlx_runtime.workers.connections import Pipes
from mlx_runtime.workers.fork_server import ForkServer, exit_reason
from mlx_runtime.workers.placement import changing_size, this_machine
from mlx_runtime.workers.recovery import RestartingGroup, WorkerDied

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

    If several processes are started, it pays off that the server imports the `modules` of the experiment, too.
    """
    global _warm_server
    if _warm_server is None:
        _warm_server = ForkServer()
        if modules:
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
        from mlx_runtime.loop.options import strategy_class

        self.cfg, self.use_gpu, self.timeout_s = cfg, cluster.use_gpu, timeout_s
        self.pipes: Pipes | None = None
        self.server = take_server()
        self.server.preload(*strategy_class(cfg.strategy).preloads, *(RAY_TRAIN if "ray.train" in sys.modules else ()))

    def inbox(self) -> Pipes:
        """Return the driver's end of the pipes that workers inherit."""
        self.pipes = Pipes()
        return self.pipes

    def start(self, job: Any, handle: Handle, stop_asked: StopAsked) -> "LocalGroup":
        return LocalGroup(self, job, handle)

    def close(self) -> None:
        self.server.close()


class LocalGroup(RestartingGroup):
    """The workers of a run, processes of this machine."""

    def __init__(self, engine: Local, job: Any, handle: Handle, here: range | None = None) -> None:
        super().__init__(engine.cfg, handle)
        self._engine, self._job = engine, job
        self._ranks = range(engine.cfg.start_workers)
        self._here = here or self._ranks  # those that this process starts
        self._scratch = tempfile.TemporaryDirectory(prefix="mlx-local-", ignore_cleanup_errors=True)
        self._output = Output(job.folder, len(self._here))
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
        died = {rank: WorkerDied(f"rank {rank} {exit_reason(code)}") for rank, code in attempt.codes.items()}
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
        self._scratch.cleanup()

    def _start(self) -> None:
        # Each attempt gets a new store, because the old one contains addresses of lost workers.
        results = self._begin_attempt()
        self._start_here(results / "store")

    def _begin_attempt(self) -> Path:
        """Return the folder for the results of a new attempt."""
        self._number += 1
        results = Path(self._scratch.name, str(self._number))
        results.mkdir()
        self._attempt = Attempt(results)
        return results

    def _start_here(self, store: Any, host: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        """Start workers with further environment variables; `store` and `host` are those of a `WorkerJob`."""
        from mlx_runtime.workers.process import WorkerJob

        engine, attempt = self._engine, self._attempt
        assert attempt is not None, "it has begun"
        backend = backend_of(use_gpu=engine.use_gpu)
        shared = WorkerJob(self._job, len(self._ranks), backend, engine.timeout_s, attempt.results, store, host)
        threads = engine.cfg.cpus_per_worker
        with contextlib.ExitStack() as inherited:
            pipes = {rank: inherited.enter_context(engine.pipes.add()) for rank in self._here} if engine.pipes else {}
            streams = {rank: [*self._output.writers[rank], *([pipes[rank]] if pipes else [])] for rank in self._here}
            start_workers(engine.server, shared, streams, self._number, threads, variables or {})

    def _kill(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        self._engine.server.kill(*self._here)
        until = time.monotonic() + EXIT_S
        while (left := [rank for rank in self._here if rank not in attempt.codes]) and time.monotonic() < until:
            self._collect_exits(attempt, timeout_s=0.1)
        if left:
            names = ", ".join(map(str, left))
            raise WorkerLostError(f"rank {names} is still running {EXIT_S:.0f} s after SIGKILL and cannot be replaced")

    def _collect_exits(self, attempt: "Attempt", timeout_s: float = 0.0) -> None:
        attempt.codes.update(self._engine.server.exits(timeout_s))

    def _forward_output(self) -> None:
        for event in self._output.lines():
            self._handle(event)


def start_workers(
    server: ForkServer,
    shared: Any,
    streams: Mapping[int, Any],
    attempt: int,
    threads: int,
    variables: Mapping[str, str],
) -> None:
    """Start workers, given a `WorkerJob`, their stdout and stderr by rank, and further environment variables.

    They get torchrun's variables, except those of its store, because every user of the machine could open it.
    """
    from mlx_runtime.workers.process import run_worker

    for local_rank, rank in enumerate(streams):
        changed: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "WORLD_SIZE": shared.world_size,
            "LOCAL_WORLD_SIZE": len(streams),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        changed |= gpus_of(shared, local_rank, len(streams))
        all_variables = {**os.environ, **{key: str(value) for key, value in changed.items()}, **variables}
        server.start(rank, partial(run_worker, shared, rank), all_variables, streams[rank])


def gpus_of(shared: Any, local_rank: int, local_world_size: int) -> dict[str, str]:
    """Return the variable that selects the GPUs of a worker: none without NCCL, or its own if each has several."""
    own = int(shared.job.cluster.gpus_per_worker)
    if "nccl" not in shared.backend:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if own <= 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(own * local_world_size)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[own * local_rank : own * (local_rank + 1)])}


@dataclass
class Attempt:
    """The processes of a group from one start to the next."""

    results: Path  # folder with the result or error of each worker
    codes: dict[int, int] = field(default_factory=dict)  # exit codes by rank
    lost: dict[int, BaseException] = field(default_factory=dict)  # workers of lost machines, by rank
    finished_at: float | None = None


CHUNK_BYTES = 65_536
"""Bytes to read at once: the capacity of a pipe."""

CHILD_S = 1.0
"""Time to read the remaining output; a child process of a worker may never stop printing."""


class Output:
    """Pipes in place of the workers' stdout and stderr, each read by a thread.

    Messages of native libraries, which write to the file descriptors, arrive as well. Each complete line is written to
    the log immediately, and kept until the driver reads it. `writers` are the workers' ends: stdout and stderr by rank.
    """

    def __init__(self, folder: RunFolder, workers: int) -> None:
        self._lines: queue.SimpleQueue[WorkerOutput] = queue.SimpleQueue()
        self._logs = [LogFile(folder, log_name(rank)) for rank in range(workers)]
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.writers = [(self._writer(log, to_stderr=False), self._writer(log, to_stderr=True)) for log in self._logs]

    def lines(self) -> Iterator[WorkerOutput]:
        """Yield the lines that arrived before this call."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get_nowait()

    def close(self) -> None:
        """Read the remaining output, for a last call of `lines`. The workers must have ended."""
        for stdout, stderr in self.writers:
            stdout.close()
            stderr.close()
        until = time.monotonic() + CHILD_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._closed = True
        for log in self._logs:
            log.close()

    def _writer(self, log: LogFile, *, to_stderr: bool) -> "connection.Connection[Any, Any]":
        """Return the end of a new pipe for a worker."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._threads.append(threading.Thread(target=self._read, args=(ours, log, to_stderr), daemon=True))
        self._threads[-1].start()
        return theirs

    def _read(self, end: "connection.Connection[Any, Any]", log: LogFile, to_stderr: bool) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        rest: list[str] = []  # of an incomplete line

        def pass_on(text: str) -> None:
            lines = "".join([*rest, text])
            rest.clear()
            log.write(f"{lines}\n")
            self._lines.put(WorkerOutput(lines, to_stderr))

        with end:
            while (content := os.read(end.fileno(), CHUNK_BYTES)) and not self._closed:
                lines, newline, last = decode(content).rpartition("\n")
                if newline:
                    pass_on(lines)
                if last:
                    rest.append(last)
            if rest:
                pass_on("")
