"""The local engine: workers are processes on this machine, forked from the driver."""

import codecs
import contextlib
import multiprocessing
import os
import queue
import shutil
import signal
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
from mlx_runtime.settings import Settings
from mlx_runtime.workers.children import exit_reason, memory_kills, unsafe_to_fork
from mlx_runtime.workers.connections import Pipes
from mlx_runtime.workers.fork_server import ForkServer
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
        from mlx_runtime.loop.options import strategy_class

        self.cfg, self.use_gpu, self.timeout_s = cfg, cluster.use_gpu, timeout_s
        self.pipes: Pipes | None = None
        self.server = take_server()
        self.server.preload(*strategy_class(cfg.strategy).preloads, *(RAY_TRAIN if "ray.train" in sys.modules else ()))

    @property
    def notice(self) -> str | None:
        why = self.server.spawns
        return f"started as new interpreters, which takes longer than forking: {why}" if why else None

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
        threads = engine.cfg.cpus_per_worker
        with contextlib.ExitStack() as inherited:
            pipes = {rank: inherited.enter_context(engine.pipes.add()) for rank in ranks} if engine.pipes else {}
            streams = {rank: [*self._output.writers[rank], *([pipes[rank]] if pipes else [])] for rank in ranks}
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


CHUNK_BYTES = 65_536
"""Bytes to read at once: the capacity of a pipe."""


class Output:
    """Pipes in place of the workers' stdout and stderr, and a thread that reads them.

    Messages of native libraries, which write to the file descriptors, arrive as well. Each complete line is written to
    the log immediately, and kept until the driver reads it. `writers` are the workers' ends: stdout and stderr by rank.
    """

    def __init__(self, folder: RunFolder, workers: int) -> None:
        self._lines: queue.SimpleQueue[WorkerOutput] = queue.SimpleQueue()
        self._logs = [LogFile(folder, log_name(rank)) for rank in range(workers)]
        self._readers: list[_Reader] = []
        self.writers: list[tuple[Any, Any]] = []
        for log in self._logs:
            (stdout, stdouts_writer), (stderr, stderrs_writer) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
            self._readers += [_Reader(stdout, log, self._lines, False), _Reader(stderr, log, self._lines, True)]
            self.writers.append((stdouts_writer, stderrs_writer))
        self._closed, self._close = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def lines(self) -> Iterator[WorkerOutput]:
        """Yield the lines that arrived before this call."""
        for _ in range(self._lines.qsize()):
            yield self._lines.get_nowait()

    def close(self) -> None:
        """Read the remaining output, for a last call of `lines`. The workers must have ended."""
        self._close.close()
        self._thread.join()
        for end in (*(reader.end for reader in self._readers), *(end for pair in self.writers for end in pair)):
            end.close()
        for log in self._logs:
            log.close()

    def _read(self) -> None:
        by_end: dict[Any, _Reader] = {reader.end: reader for reader in self._readers}
        while self._closed not in (ready := connection.wait([*by_end, self._closed])):
            for end in ready:
                by_end[end].take()
        for reader in self._readers:  # once: a child process of a worker may never stop printing
            reader.take()
            reader.complete()
        self._closed.close()


class _Reader:
    """One pipe, and its incomplete last line."""

    def __init__(self, end: Any, log: LogFile, lines: "queue.SimpleQueue[WorkerOutput]", to_stderr: bool) -> None:
        os.set_blocking(end.fileno(), False)
        self.end, self._log, self._lines, self._to_stderr = end, log, lines, to_stderr
        self._rest: list[str] = []
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def take(self) -> None:
        """Read from the pipe, and pass on complete lines."""
        with contextlib.suppress(BlockingIOError):
            self._pass_on(self._decode(os.read(self.end.fileno(), CHUNK_BYTES)))

    def complete(self) -> None:
        """Pass on an incomplete last line."""
        if self._rest:
            self._pass_on("\n")

    def _pass_on(self, text: str) -> None:
        lines, newline, rest = text.rpartition("\n")
        if newline:
            lines, self._rest = "".join([*self._rest, lines]), []
            self._log.write(lines + newline)
            self._lines.put(WorkerOutput(lines, self._to_stderr))
        if rest:
            self._rest.append(rest)


class Scratch:
    """A folder that only this user can open, until `close`."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
