"""Workers as processes of this machine, forked from the driver."""

import atexit
import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, cast

from mlx_runtime.engines.base import Handle, StopAsked
from mlx_runtime.engines.output import Output
from mlx_runtime.engines.processes import Ended, Kill, Preload, Start, held_signals, serve, unsafe_to_fork
from mlx_runtime.errors import MlxError, WorkerLostError, first_line
from mlx_runtime.settings import Settings

ORIGIN_S = 3.0
"""How long the group waits for the reason when a worker only reports that it lost another one."""

UNWIND_S = 5.0
"""How long the others may take to end by themselves when user code of one worker raised: one may store a checkpoint."""

LEAVE_S = 10.0
"""How long a worker that has finished may take to exit, and the server to end."""


class ForkServer:
    """The driver's side of the process that starts workers.

    Attributes:
        spawns: why workers are fresh interpreters instead of forks, or None.
    """

    def __init__(self) -> None:
        self.spawns = "MLX_START_METHOD=spawn" if Settings.read().spawn else unsafe_to_fork()
        context = multiprocessing.get_context("spawn" if self.spawns else "fork")
        if not self.spawns:
            gc.freeze()  # so that workers keep sharing the memory of what is imported
        self._control, servers_end = context.Pipe()
        inherited = None if self.spawns else self._control
        self._process: Any = cast(Any, context).Process(
            target=serve, args=(servers_end, inherited, not self.spawns), name="fork server"
        )
        if self.spawns:  # it would start this process in between, and let signals through again
            resource_tracker.ensure_running()
        with held_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts any thread as unsafe
            self._process.start()
            atexit.register(self.close)  # before multiprocessing waits for its children
        servers_end.close()

    def preload(self) -> None:
        """Import what workers need, while the driver continues."""
        self._send(Preload())

    def start(self, job: bytes, environments: list[dict[str, str]], streams: "list[tuple[Any, Any]]") -> None:
        """Start one worker per environment.

        Args:
            job: pickled `WorkerJob`.
            environments: of each rank.
            streams: where each rank's stdout and stderr go.
        """
        self._send(Start(job, tuple(environments)))
        try:
            for stream in (stream for pair in streams for stream in pair):
                send_handle(self._control, stream.fileno(), self._process.pid)
        except OSError as error:
            raise self._gone() from error

    def kill_workers(self) -> None:
        self._send(Kill())

    def ended(self, timeout_s: float = 0.0) -> Iterator[Ended]:
        """Yield workers that have ended, waiting up to `timeout_s` for the first.

        Raises:
            MlxError: the server is gone.
        """
        try:
            while self._control.poll(timeout_s):
                yield self._control.recv()
                timeout_s = 0.0
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def close(self) -> None:
        """End the server, and with it all workers."""
        atexit.unregister(self.close)
        self._control.close()
        if sys.platform == "linux" and self._process.is_alive():  # otherwise its number may be another's by now
            os.kill(self._process.pid, signal.SIGRTMIN)  # heard even in the middle of an import
        self._process.join(LEAVE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _send(self, order: Any) -> None:
        try:
            self._control.send(order)
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> MlxError:
        self._process.join(LEAVE_S)
        return MlxError(f"the fork server ended: it {_how(self._process.exitcode)}; all workers ended with it")


_warm: ForkServer | None = None
"""Forked by `warm_up`, and not taken by a run yet: user code's main.py is between the two."""


def warm_up() -> None:
    """Fork the server now: the driver has imported the experiment, and has done nothing else yet that forbids it."""
    global _warm
    if _warm is None and not Settings.read().spawn and not unsafe_to_fork():
        _warm = ForkServer()


def cool_down() -> None:
    """Close the server that `warm_up` has forked: another engine starts the workers."""
    global _warm
    server, _warm = _warm, None
    if server is not None:
        server.close()


class Local:
    """The engine of one machine. Make it in the main thread, before others are started.

    Args:
        workers: their number.
        use_gpu: each trains on a GPU of its own.
        cpus_per_worker: threads of each.
        max_failures: how often lost workers are replaced; -1 means always.
        timeout_s: of collectives.
    """

    def __init__(
        self, workers: int, *, use_gpu: bool, cpus_per_worker: int, max_failures: int, timeout_s: float
    ) -> None:
        global _warm
        self.workers, self.use_gpu, self.cpus_per_worker = workers, use_gpu, cpus_per_worker
        self.max_failures, self.timeout_s = max_failures, timeout_s
        self.server, _warm = _warm or ForkServer(), None
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
    """The workers of a run, started again from the last checkpoint when one of them is lost.

    Args:
        engine: that starts them.
        job: of the run.
        handle: takes events.
    """

    def __init__(self, engine: Local, job: Any, handle: Handle) -> None:
        self._engine, self._job, self._handle = engine, job, handle
        self._scratch = Path(tempfile.mkdtemp(prefix="mlx-local-"))
        self._output = Output(job.folder, engine.workers)
        self._running = False
        self._failures = 0
        self._codes: dict[int, int] = {}
        self._suspicious_since: float | None = None
        self._finished_at: float | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        for ended in self._engine.server.ended():
            self._codes[ended.rank] = ended.code
        self._print()
        errors = dict(self._errors())
        if not errors:
            return not self._finished()
        self._suspicious_since = self._suspicious_since or time.monotonic()
        of_users = [e for e in errors.values() if isinstance(e, MlxError) and not isinstance(e, WorkerLostError)]
        if of_users:
            all_ended = len(self._codes) == self._engine.workers
            if all_ended or time.monotonic() - self._suspicious_since > UNWIND_S:
                raise of_users[0]
            return True
        origins = {rank: error for rank, error in errors.items() if not isinstance(error, WorkerLostError)}
        if not origins and time.monotonic() - self._suspicious_since < ORIGIN_S:
            return True  # another worker is about to say why
        self._replace(origins or errors)
        return True

    def close(self) -> None:
        with contextlib.suppress(MlxError):
            self._end_workers()
        self._output.close()
        self._print()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from mlx_runtime.engines.worker import WorkerJob

        engine = self._engine
        timeout = datetime.timedelta(seconds=engine.timeout_s)
        # A new one for each attempt: in the old one are the addresses of workers that are gone.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._codes, self._suspicious_since, self._finished_at = {}, None, None
        self._results = self._scratch / str(self._failures)
        self._results.mkdir()
        shared = pickle.dumps(WorkerJob(self._job, engine.use_gpu, engine.timeout_s, self._results))
        environments = [self._environment(rank) for rank in range(engine.workers)]
        self._running = True
        engine.server.start(shared, environments, self._output.writers)

    def _environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables; as there, the launcher hosts the store."""
        engine, threads = self._engine, str(self._engine.cpus_per_worker)
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
        hidden = {} if engine.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **{name: str(value) for name, value in changed.items()}, **hidden}

    def _errors(self) -> Iterator[tuple[int, BaseException]]:
        """How workers have failed, by rank: their own error, or a `_Death`."""
        from mlx_runtime.engines.worker import stored

        for rank in range(self._engine.workers):
            is_stored, error = stored(self._results, rank)
            if error is not None:
                yield rank, error
            elif not is_stored and rank in self._codes:
                yield rank, _Death(f"rank {rank} {_how(self._codes[rank])}")

    def _finished(self) -> bool:
        """True once all workers have succeeded and are gone."""
        from mlx_runtime.engines.worker import stored

        ranks = range(self._engine.workers)
        if len(self._codes) == len(ranks):
            return True
        if all(stored(self._results, rank)[0] for rank in ranks):
            self._finished_at = self._finished_at or time.monotonic()
            return time.monotonic() - self._finished_at > LEAVE_S  # something of the user's keeps it from exiting
        return False

    def _replace(self, errors: dict[int, BaseException]) -> None:
        why = first_line(next(iter(errors.values())))
        limit = self._engine.max_failures
        if 0 <= limit <= self._failures:
            used = f"; {limit} replacements (cfg.max_failures) are used up" if limit else ""
            raise WorkerLostError(f"a worker was lost: {why}{used}")
        self._handle({"kind": "lost", "ranks": list(errors), "why": why})
        self._end_workers()
        left = ", ".join(str(rank) for rank in range(self._engine.workers) if rank not in self._codes)
        if left:
            raise WorkerLostError(
                f"rank {left} still runs {LEAVE_S:.0f} s after SIGKILL, so no other can take its place"
            )
        self._failures += 1
        self._start()

    def _end_workers(self) -> None:
        if not self._running:
            return
        server = self._engine.server
        server.kill_workers()
        until = time.monotonic() + LEAVE_S
        while len(self._codes) < self._engine.workers and time.monotonic() < until:
            for ended in server.ended(timeout_s=0.1):
                self._codes[ended.rank] = ended.code

    def _print(self) -> None:
        for item in self._output.lines():
            self._handle({"kind": "output", "text": item.text, "to_stderr": item.to_stderr})


class _Death(Exception):  # noqa: N818 - of a process
    """A worker ended without storing a result."""


def _how(code: int | None) -> str:
    """How a process ended, for a sentence."""
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # of the real-time signals only two have names
        name = f"signal {-code}"
    memory = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}"
