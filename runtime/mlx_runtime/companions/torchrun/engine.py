"""The engine of torchrun: rank 0's process drives the run and starts its own worker; the others are workers."""

import contextlib
import copy
import dataclasses
import os
import pickle
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mlx_runtime.companions.torchrun.offers import Offer
from mlx_runtime.companions.torchrun.roster import check_port
from mlx_runtime.companions.torchrun.seats import Seat
from mlx_runtime.companions.torchrun.worker import LOST, SHARED, keep_alive
from mlx_runtime.distributed.messages import decode
from mlx_runtime.errors import ConfigError, MlxError, WorkerLoopError, WorkerLostError, short_message
from mlx_runtime.events import WorkerConnected
from mlx_runtime.events import decode as decode_event
from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked, backend_of, lost
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.loop.strategies import strategy_names
from mlx_runtime.storage.files import is_uri
from mlx_runtime.workers.local import Local, LocalGroup
from mlx_runtime.workers.placement import changing_size, is_launched, this_machine
from mlx_runtime.workers.receiver import Receiver
from mlx_runtime.workers.recovery import WorkerDied
from mlx_runtime.workers.stop_requests import Terminated

ATTEMPT = "MLX_ATTEMPT"
"""Environment variable of the attempts of `mlx train join`: `FAILURES:FILE`, of those before, and for the run."""


class Torchrun(Local):
    """The engine for processes that torchrun, or srun, has started."""

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> str | None:
        if not is_launched():
            return "torchrun did not start this process; run `torchrun … main.py`, or `mlx train join nodes.json`"
        if cfg.start_workers != (count := Seat.read().world_size):
            return f"it started {count} processes, but cfg.start_workers={cfg.start_workers}; omit cfg.start_workers"
        return changing_size(cfg)

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Iterator[Cluster]:
        seat, own = Seat.read(), copy.copy(cfg)
        if seat.keeps_store:  # found here, before the run is claimed
            check_port(seat.port, "set MASTER_PORT to another one")
        own.start_workers = seat.local_world_size
        title = f"started by torchrun, {seat.local_world_size} of them on this machine"
        yield dataclasses.replace(this_machine(own), title=title, host=seat.host())

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        super().__init__(cfg, cluster, timeout_s=timeout_s)
        self.host = cluster.host

    def inbox(self) -> "Members":  # workers elsewhere inherit no pipes
        try:
            self.members = Members(self.host)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR is {self.host}, which is not an address of this machine: {error.strerror}"
            ) from error
        return self.members

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "TorchrunGroup":
        return TorchrunGroup(self, job, handle, stop_asked)


class Members(Receiver):
    """The driver's end of the connections to all workers. Each worker has one, for as long as it trains."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.gone: set[int] = set()  # ranks whose connections have been closed

    def read(self, connection: "Connection[Any, Any]") -> None:
        keep_alive(connection)
        with contextlib.suppress(EOFError, OSError, ValueError):
            message = connection.recv_bytes()
            self._messages.put(message)
            super().read(connection)
            if isinstance(event := decode_event(message), WorkerConnected):
                self.gone.add(event.rank)


class TorchrunGroup(LocalGroup):
    """The workers of a run: one of this process, and the other processes. If one is lost, the attempt ends."""

    _engine: Torchrun

    def __init__(self, engine: Torchrun, job: Job, handle: Handle, stop_asked: StopAsked) -> None:
        self._seat, self._stop_asked, self._parent = Seat.read(), stop_asked, os.getppid()
        self._waiting_since, self._titles = time.monotonic(), dict[int, str]()
        self._missing = list(range(1, self._seat.world_size))
        self._blind = False  # a process does not see the storage
        super().__init__(engine, job, handle, here=range(1))

    def poll(self) -> bool:
        if os.getppid() != self._parent:
            self._replace({0: WorkerDied("torchrun has ended")})
        if self._attempt is not None:
            return super().poll()
        if self._stop_asked():
            raise Terminated
        self._admit()
        for rank in self._engine.members.gone & self._titles.keys():
            self._replace({rank: WorkerDied(f"{self._titles[rank]} is gone")})
        if not self._missing:
            self._begin()
        elif time.monotonic() - self._waiting_since > (limit_s := self._engine.cfg.elastic.hang_timeout_s):
            self._replace(
                {0: WorkerDied(f"{self.waits_for()} did not join within {limit_s:g} s (cfg.elastic.hang_timeout_s)")}
            )
        return True

    def waits_for(self) -> str | None:
        return f"rank {', '.join(map(str, self._missing))}" if self._missing else None

    def _start(self) -> None:
        """Offer the job to the other processes; `poll` starts the worker of this one once they are ready."""
        engine = self._engine
        failures, _, file = os.environ.get(ATTEMPT, "").partition(":")
        if file:
            Path(file).write_text(self._job.folder.location)
        self._is_last = not file or 0 <= engine.cfg.elastic.max_failures <= int(failures)
        gpus = self._job.cluster.gpus_per_worker if engine.use_gpu else 0
        offer = Offer.of(self._job, backend_of(use_gpu=engine.use_gpu), engine.timeout_s, gpus)
        self._store = self._seat.store(serves=True)
        self._store.set("job", offer.encode())

    def _admit(self) -> None:
        """Take the answers of the other processes."""
        for rank in [rank for rank in self._missing if self._store.check([f"ready/{rank}"])]:
            title, problem, sees = self._answer(f"ready/{rank}", (str, str, bool))
            if problem:
                raise ConfigError(f"{title} {problem}")
            if not sees:
                _check_storage(title, self._job, self._engine.cfg)
                self._blind = True
            self._titles[rank] = title
            self._missing.remove(rank)

    def _answer(self, key: str, types: tuple[type, ...]) -> list[Any]:
        try:
            answer = decode(self._store.get(key))
        except ValueError:
            answer = None
        if not isinstance(answer, list) or tuple(map(type, answer)) != types:
            raise MlxError(f"torchrun's store has an invalid {key}: another program writes to it")
        return answer

    def _begin(self) -> None:
        self._begin_attempt()
        self._job = dataclasses.replace(
            self._job, cluster=dataclasses.replace(self._job.cluster, shares_storage=not self._blind)
        )
        self._store.set("start", b"" if self._blind else SHARED)
        variables = {"LOCAL_WORLD_SIZE": str(self._seat.local_world_size)}
        self._start_here(self._seat.store, self._engine.host, variables)

    def _collect_exits(self, attempt: Any, timeout_s: float = 0.0) -> None:
        super()._collect_exits(attempt, timeout_s)
        gone = set(self._engine.members.gone)
        with contextlib.suppress(RuntimeError):  # the store is gone, and torchrun
            for rank in set(self._titles) - set(attempt.codes) if gone or self._store.add("ended", 0) else ():
                if self._store.check([f"ended/{rank}"]):
                    succeeded, is_lost, text = self._answer(f"ended/{rank}", (bool, bool, str))
                    error = None if succeeded else WorkerLostError(text) if is_lost else WorkerLoopError(text)
                    (attempt.results / str(rank)).write_bytes(pickle.dumps(error))
                    attempt.codes[rank] = int(not succeeded)
                elif rank in gone:
                    attempt.lost[rank] = WorkerDied(f"{self._titles[rank]} is gone")
                    attempt.codes[rank] = -9

    def _replace(self, errors: dict[int, BaseException]) -> None:
        """End the attempt: `mlx train join` begins the next one."""
        error = lost(short_message(next(iter(errors.values()))), 0)
        if not self._is_last:
            error.exit_code, error.hint = LOST, "The next attempt resumes the run"
        raise error


def _check_storage(title: str, job: Job, cfg: Any) -> None:
    """Refuse to train if a process that does not see the storage of the run would have to use it."""
    problem, kinds = "", map(strategy_class, strategy_names(cfg, job.tree.get("models")))
    if any(getattr(kind, "stores_shards", kind.shards) for kind in kinds):
        problem = f"with cfg.strategy={cfg.strategy}, each worker writes its shards; share the storage, or use ddp"
    elif any(not is_uri(item.root) for item in job.prepared.values()):
        problem = "prepared datasets are read from there; share the storage, or add --no-prepared"
    if problem:
        raise ConfigError(f"{title} cannot access the storage {job.root}: {problem}")
