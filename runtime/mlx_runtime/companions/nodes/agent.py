"""A machine that joins a run: it fetches the code, starts workers on request, and forwards their output and results."""

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.nodes.channel import BEAT_S, LOST_S, Channel, connect
from mlx_runtime.companions.nodes.rendezvous import RESTORED, versions
from mlx_runtime.companions.nodes.store import NetworkStore
from mlx_runtime.config.projects import project_module
from mlx_runtime.errors import MlxError, short_message
from mlx_runtime.loop.job import Job
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.workers.fork_server import ForkServer
from mlx_runtime.workers.local import start_workers
from mlx_runtime.workers.process import WorkerJob

AGAIN_S = 1.0
"""Interval between attempts to connect."""

REJOIN_S = 600.0
"""Time for the first machine to answer again after the connection was lost."""

REFUSED_S = 5.0
"""Time for it to accept a connection, if it refuses one then: the run has ended."""

TICK_S = 0.1
"""Interval at which the results of workers are collected."""

KILL_S = 10.0
"""Time for killed workers to end."""

CHUNK_BYTES = 65_536
"""Bytes of output to read at once: the capacity of a pipe."""


def join(address: tuple[str, int], key: str, name: str | None, source: str | None, wait_s: float) -> int:
    """Join a run, and work for it until it ends. Return the exit code.

    Args:
        address: Host and port of the first machine.
        key: Key of the run.
        name: Name of this machine in the run; None if its address tells, or if any will do.
        source: Address of this machine for the others; None for the one from which it reaches the first machine.
        wait_s: Time for the first machine to answer.
    """
    agent = Agent(address, key.encode(), name, source)
    try:
        return agent.work(wait_s)
    finally:
        agent.close()


class Agent:
    """This machine's part of a run."""

    def __init__(self, address: tuple[str, int], key: bytes, name: str | None, source: str | None) -> None:
        self._head, self._key, self._name, self._source = address, key, name, source
        self._process = uuid.uuid4().hex
        self._scratch = tempfile.TemporaryDirectory(prefix="mlx-node-", ignore_cleanup_errors=True)
        self._channel: Channel | None = None
        self._server: ForkServer | None = None
        self._code, self._project = "", Path()
        self._workers: _Workers | None = None
        self._sees_storage, self._outdated = False, True  # files in `_storage` are of an earlier attempt

    def work(self, wait_s: float) -> int:
        while True:
            channel = self._channel = self._join(wait_s)
            try:
                self._serve(channel)
                print("end       of the run", flush=True)
                return int(self._workers is None or any(self._workers.codes.values()))
            except (OSError, EOFError) as error:
                why = short_message(error) if isinstance(error, TimeoutError) else "the connection was closed"
                print(f"lost      the first machine: {why}; joining again", flush=True)
            finally:
                channel.close()
            self._end_workers()
            wait_s = REJOIN_S

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._channel is not None:
            self._channel.close()
        self._scratch.cleanup()

    def _join(self, wait_s: float) -> Channel:
        """Return a connection to the first machine, once that has admitted this one."""
        began, title, told = time.monotonic(), f"{self._head[0]}:{self._head[1]}", ""
        while True:
            channel = None
            try:
                channel = connect(self._head, self._key, self._source)
                channel.send("join", self._hello(channel.own_address))
                kind, *facts = channel.receive()
                if kind == "welcome":
                    self._prepare(channel, facts[0])
                    return channel
                problem, again = facts
            except AuthenticationError as error:
                raise MlxError(f"cannot join {title}: {error}") from None
            except (OSError, EOFError) as error:
                problem, again = getattr(error, "strerror", None) or short_message(error), True
                if self._server is not None and isinstance(error, ConnectionRefusedError):
                    wait_s = REFUSED_S
            if channel is not None:
                channel.close()
            if not again or time.monotonic() - began > wait_s:
                raise MlxError(f"cannot join {title}: {problem}")
            if problem != told:
                print(f"waiting   for {title}: {problem}", flush=True)
                told = problem
            time.sleep(AGAIN_S)

    def _hello(self, address: str) -> dict[str, Any]:
        name, process, gpus = self._name, self._process, torch.cuda.device_count()
        return {"name": name, "process": process, "address": address, "versions": versions(), "gpus": gpus}

    def _prepare(self, channel: Channel, offer: dict[str, Any]) -> None:
        """Get the code, import it, and start the server of workers, before this process has threads."""
        print(f"joined    {self._head[0]}:{self._head[1]} as {offer['name']}", flush=True)
        self._name = offer["name"]
        if self._server is None:
            self._code, self._project = offer["code"], self._fetch(channel, offer)
            os.chdir(self._project)
            module, _, _ = offer["experiment"].rpartition(".")
            try:
                project_module(module, self._project)
            except MlxError as error:
                channel.send("failed", str(error))
                raise
            self._server = ForkServer()
            self._server.preload(*offer["preloads"])
        elif self._code != offer["code"]:
            raise MlxError("the code of the run has changed; join again, in a new process")
        self._sees_storage = _sees(*offer["storage"])
        channel.send("ready", self._sees_storage)

    def _fetch(self, channel: Channel, offer: dict[str, Any]) -> Path:
        """Return a folder with the code: the working directory if it has the same files, or else a copy of them."""
        here = Path.cwd()
        if all(_has(here / name, digest) for name, digest in offer["files"].items()):
            print(f"code      {here}", flush=True)
            return here
        channel.send("code")
        kind = ""
        while kind != "code":
            kind, *facts = channel.receive()
        if hashlib.sha256(facts[0]).hexdigest() != offer["code"]:
            raise MlxError("the code that arrived is not the code of the run")
        copy = Path(self._scratch.name, "code")
        copy.mkdir()
        (copy / snapshots.CODE).write_bytes(facts[0])
        folder = snapshots.unpack(RunFolder(copy))
        print(f"code      {folder}, copied from the first machine", flush=True)
        return folder

    def _serve(self, channel: Channel) -> None:
        """Follow the orders of the first machine until the run has ended."""
        server, beat_at, heard_at = self._server, 0.0, time.monotonic()
        assert server is not None
        self._outdated = True
        while True:
            pipes = self._workers.pipes if self._workers is not None else {}
            ends: list[Any] = [channel, server, *pipes]
            ready: list[Any] = connection.wait(ends, TICK_S if self._workers is not None else BEAT_S)
            now = time.monotonic()
            if now - beat_at > BEAT_S:
                channel.send("beat")
                beat_at = now
            if self._workers is not None:
                self._workers.report(channel, server, [pipe for pipe in ready if pipe in pipes])
            elif server in ready:
                dict(server.exits())  # raises an error if the server has ended
            if channel in ready:
                heard_at = now
                match channel.receive():
                    case ("end",):
                        return
                    case ("kill",) if self._workers is not None:
                        server.kill(*self._workers.ranks)
                    case ("file", path, content):
                        with _reported(channel):
                            self._add_to_file(path, content)
                    case ("start", facts):
                        with _reported(channel):
                            self._start(channel, server, facts)
            elif now - heard_at > LOST_S:
                raise TimeoutError(f"it sent nothing for {LOST_S:.0f} s")

    @property
    def _storage(self) -> Path:
        """Folder in place of the storage, if this machine does not see it."""
        return Path(self._scratch.name, "storage")

    def _clear_storage(self) -> None:
        if self._outdated:
            shutil.rmtree(self._storage, ignore_errors=True)
            self._outdated = False

    def _add_to_file(self, path: str, content: bytes) -> None:
        self._clear_storage()
        if not stays_below(path):
            raise MlxError(f"the first machine sent a file {path!r:.100}")
        file = self._storage / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            stream.write(content)

    def _start(self, channel: Channel, server: ForkServer, facts: dict[str, Any]) -> None:
        """Start the workers of an attempt."""
        self._clear_storage()
        self._outdated = True  # the next attempt restores another checkpoint
        job: Job = pickle.loads(facts["job"])
        tree, attempt, ranks = job.tree, facts["attempt"], facts["ranks"]
        if (self._storage / RESTORED).is_dir():
            tree = tree | {"cfg": tree["cfg"] | {"restore_checkpoint_path": str(self._storage / RESTORED)}}
        root = job.root if self._sees_storage else str(self._storage)
        results = Path(self._scratch.name, uuid.uuid4().hex)
        results.mkdir()
        shared = WorkerJob(
            dataclasses.replace(job, project=self._project, root=root, tree=tree),
            facts["world_size"],
            facts["backend"],
            facts["timeout_s"],
            results,
            partial(NetworkStore, self._head, self._key, attempt, self._source),
            channel.own_address,
            ranks[0],
        )
        streams: dict[int, Any] = {}
        pipes: dict[Any, tuple[int, int]] = {}
        for rank in ranks:
            (stdout, stdouts_writer), (stderr, stderrs_writer) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
            pipes |= {stdout: (rank, 0), stderr: (rank, 1)}
            streams[rank] = stdouts_writer, stderrs_writer
        start_workers(
            server, shared, streams, attempt=attempt, threads=facts["threads"], node=facts["node"], name=facts["name"]
        )
        for writer in (end for pair in streams.values() for end in pair):
            writer.close()  # so that a pipe ends with its worker
        self._workers = _Workers(attempt, ranks, results, pipes)

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is None or self._server is None:
            return
        self._server.kill(*workers.ranks)
        until = time.monotonic() + KILL_S
        while len(workers.codes) < len(workers.ranks) and time.monotonic() < until:
            workers.codes |= dict(self._server.exits(TICK_S))
        for pipe in workers.pipes:
            pipe.close()


@contextlib.contextmanager
def _reported(channel: Channel) -> Iterator[None]:
    """Report errors of this machine's disk to the first machine, instead of taking them for a lost connection."""
    try:
        yield
    except OSError as error:
        text = short_message(error)
        channel.send("failed", text)
        raise MlxError(text) from error


@dataclasses.dataclass
class _Workers:
    """The workers of this machine in one attempt."""

    attempt: int
    ranks: range
    results: Path  # folder with the result of each worker
    pipes: dict[Any, tuple[int, int]]  # rank, and 1 for stderr
    codes: dict[int, int] = dataclasses.field(default_factory=dict)  # exit codes by rank
    reported: set[int] = dataclasses.field(default_factory=set)  # ranks whose results were sent

    def report(self, channel: Channel, server: ForkServer, readable: Iterable[Any]) -> None:
        """Send output, results and exit codes to the first machine, in this order."""
        exits = dict(server.exits())
        for pipe in [pipe for pipe, (rank, _) in self.pipes.items() if pipe in readable or rank in exits]:
            self._forward(channel, pipe, to_end=self.pipes[pipe][0] in exits)
        for file in self.results.iterdir():
            if file.name.isdecimal() and (rank := int(file.name)) not in self.reported:
                self.reported.add(rank)
                channel.send("result", self.attempt, rank, file.read_bytes())
        for rank, code in exits.items():
            self.codes[rank] = code
            channel.send("exit", self.attempt, rank, code)

    def _forward(self, channel: Channel, pipe: Any, *, to_end: bool) -> None:
        """Send the output that has arrived; `to_end` sends all that an ended worker has printed."""
        os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while content := os.read(pipe.fileno(), CHUNK_BYTES):
                channel.send("output", *self.pipes[pipe], content)
                if not to_end:
                    return
            del self.pipes[pipe]
            pipe.close()


def _has(file: Path, digest: str) -> bool:
    with contextlib.suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest() == digest
    return False


def _sees(root: str, experiment: str, run: str, claim: str, mark: str) -> bool:
    """Return True if this machine reads the run's folder: it has the same claim as on the first machine."""
    with contextlib.suppress(OSError, MlxError):
        return hashlib.sha256(run_folder(root, experiment, run).document(claim)).hexdigest() == mark
    return False
