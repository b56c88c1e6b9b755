"""The local engine: workers are processes on this machine, forked from the driver."""

import contextlib
import datetime
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_runtime.errors import MlxError, WorkerLostError, short_message
from mlx_runtime.events import WorkerOutput, WorkersLost
from mlx_runtime.settings import Settings
from mlx_runtime.training.engines.base import Handle, StopAsked
from mlx_runtime.training.engines.fork_server import ForkServer
from mlx_runtime.training.engines.output import Output
from mlx_runtime.training.engines.processes import exit_reason, unsafe_to_fork

ORIGIN_S = 3.0
"""How long to wait for the cause when a worker reports only that it lost another one."""

UNWIND_S = 5.0
"""How long other workers may take to end when user code failed on one; they may be saving a checkpoint."""

EXIT_S = 10.0
"""How long a worker may take to exit after it has finished or was killed."""

_warm_server: ForkServer | None = None
"""Started by `warm_up` and not yet used by a run."""


def warm_up() -> None:
    """Start the fork server early, right after the driver has imported the experiment and while forking is safe."""
    global _warm_server
    if _warm_server is None and not Settings.read().spawn and not unsafe_to_fork():
        _warm_server = ForkServer()


def cool_down() -> None:
    """Close the server of `warm_up`, because another engine starts the workers."""
    global _warm_server
    server, _warm_server = _warm_server, None
    if server is not None:
        server.close()


class Local:
    """The engine for one machine. Construct it in the main thread, before other threads are started.

    Args:
        workers: Number of workers.
        use_gpu: Give each worker a GPU.
        cpus_per_worker: Number of threads of each.
        max_failures: How many times lost workers are replaced; -1 means no limit.
        timeout_s: Timeout of collectives.
    """

    def __init__(
        self, workers: int, *, use_gpu: bool, cpus_per_worker: int, max_failures: int, timeout_s: float
    ) -> None:
        global _warm_server
        self.workers, self.use_gpu, self.cpus_per_worker = workers, use_gpu, cpus_per_worker
        self.max_failures, self.timeout_s = max_failures, timeout_s
        self.server, _warm_server = _warm_server or ForkServer(), None
        self.server.preload()

    @property
    def notice(self) -> str | None:
        why = self.server.spawns
        return f"started as new interpreters, which takes longer than forking: {why}" if why else None

    def start(self, job: Any, handle: Handle, stop_asked: StopAsked) -> "LocalGroup":
        return LocalGroup(self, job, handle)

    def close(self) -> None:
        self.server.close()


class LocalGroup:
    """The workers of a run. If one of them is lost, all are restarted from the last checkpoint.

    Args:
        engine: The engine that starts them.
        job: The run.
        handle: Called with events.
    """

    def __init__(self, engine: Local, job: Any, handle: Handle) -> None:
        self._engine, self._job, self._handle = engine, job, handle
        self._scratch = Path(tempfile.mkdtemp(prefix="mlx-local-"))
        self._output = Output(job.folder, engine.workers)
        self._failures = 0
        self._running = False
        self._codes: dict[int, int] = {}
        self._failed_at: float | None = None
        self._finished_at: float | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        self._collect_exits()
        self._forward_output()
        errors = dict(self._errors())
        if not errors:
            return not self._finished()
        self._failed_at = self._failed_at or time.monotonic()
        failed_s = time.monotonic() - self._failed_at
        origins = {rank: error for rank, error in errors.items() if not isinstance(error, WorkerLostError)}
        of_users = [error for error in origins.values() if isinstance(error, MlxError)]
        if of_users:
            if len(self._codes) == self._engine.workers or failed_s > UNWIND_S:
                raise of_users[0]
        elif origins or failed_s >= ORIGIN_S:
            self._replace(origins or errors)
        return True

    def close(self) -> None:
        with contextlib.suppress(MlxError):
            self._kill()
        self._output.close()
        self._forward_output()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from mlx_runtime.training.engines.worker import WorkerJob

        engine = self._engine
        timeout = datetime.timedelta(seconds=engine.timeout_s)
        # Each attempt gets a new store: the old one has the addresses of lost workers.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._codes, self._failed_at, self._finished_at = {}, None, None
        self._results = self._scratch / str(self._failures)
        self._results.mkdir()
        job = pickle.dumps(WorkerJob(self._job, engine.use_gpu, engine.timeout_s, self._results))
        environments = [self._environment(rank) for rank in range(engine.workers)]
        self._running = True
        engine.server.start(job, environments, self._output.writers)

    def _environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables; as with torchrun, the launcher hosts the store."""
        engine, threads = self._engine, self._engine.cpus_per_worker
        changed: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "WORLD_SIZE": engine.workers,
            "LOCAL_WORLD_SIZE": engine.workers,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": self._failures,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        if not engine.use_gpu:
            changed["CUDA_VISIBLE_DEVICES"] = ""
        return {**os.environ, **{name: str(value) for name, value in changed.items()}}

    def _errors(self) -> Iterator[tuple[int, BaseException]]:
        """Yield the failed workers by rank: their own error, or a `_ProcessDied`."""
        from mlx_runtime.training.engines.worker import load_result

        for rank in range(self._engine.workers):
            finished, error = load_result(self._results, rank)
            if error is not None:
                yield rank, error
            elif not finished and rank in self._codes:
                yield rank, _ProcessDied(f"rank {rank} {exit_reason(self._codes[rank])}")

    def _finished(self) -> bool:
        """Return True once all workers have succeeded and exited, or do not exit in time."""
        from mlx_runtime.training.engines.worker import load_result

        ranks = range(self._engine.workers)
        if len(self._codes) == len(ranks):
            return True
        if all(load_result(self._results, rank)[0] for rank in ranks):
            self._finished_at = self._finished_at or time.monotonic()
            return time.monotonic() - self._finished_at > EXIT_S  # user code keeps a process from exiting
        return False

    def _replace(self, errors: dict[int, BaseException]) -> None:
        why = short_message(next(iter(errors.values())))
        limit = self._engine.max_failures
        if 0 <= limit <= self._failures:
            used = f"; no replacements are left (cfg.max_failures={limit})" if limit else ""
            raise WorkerLostError(f"a worker was lost: {why}{used}")
        self._handle(WorkersLost(tuple(errors), why))
        self._kill()
        left = ", ".join(str(rank) for rank in range(self._engine.workers) if rank not in self._codes)
        if left:
            raise WorkerLostError(f"rank {left} is still running {EXIT_S:.0f} s after SIGKILL and cannot be replaced")
        self._failures += 1
        self._start()

    def _kill(self) -> None:
        if not self._running:
            return
        self._engine.server.kill_workers()
        until = time.monotonic() + EXIT_S
        while len(self._codes) < self._engine.workers and time.monotonic() < until:
            self._collect_exits(timeout_s=0.1)

    def _collect_exits(self, timeout_s: float = 0.0) -> None:
        for item in self._engine.server.exits(timeout_s):
            self._codes[item.rank] = item.code

    def _forward_output(self) -> None:
        for item in self._output.lines():
            self._handle(WorkerOutput(item.text, item.to_stderr))


class _ProcessDied(Exception):  # noqa: N818 - it is a worker's fate rather than an error of this process
    """A worker ended without storing a result."""
