"""The engine for several machines: this one runs the driver and the first ranks, and the others join with its key."""

import contextlib
import copy
import dataclasses
import hashlib
import os
import pickle
import secrets
import shlex
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlx_runtime.companions import is_remote
from mlx_runtime.companions.nodes.rendezvous import RESTORED, Member, Message, Rendezvous
from mlx_runtime.companions.nodes.roster import KEY_BYTES, Node, nodes_of
from mlx_runtime.companions.nodes.store import NetworkStore, Values
from mlx_runtime.errors import ConfigError, MlxError, WorkerLostError
from mlx_runtime.events import Notice
from mlx_runtime.loop.job import Cluster, Handle, Job, StopAsked, address_towards, backend_of
from mlx_runtime.loop.options import strategy_class
from mlx_runtime.loop.strategies import strategy_names
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, attempt_name
from mlx_runtime.storage.files import Storage, is_uri, join_path, parent_of, storage_at
from mlx_runtime.workers.local import Local, LocalGroup
from mlx_runtime.workers.placement import this_machine
from mlx_runtime.workers.stop_requests import Terminated

KEY = "MLX_JOIN_KEY"
"""Environment variable with the key of the run, on all its machines."""

CHUNK_BYTES = 1 << 20
"""Size of the messages with the content of files."""

SSH_OPTIONS = [f"-o{option}" for option in ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10")]
"""With these, an SSH to a machine that is gone ends soon, so that the machine is started again."""

SSH_PAUSE_S, MAX_SSH_PAUSE_S = 5.0, 60.0
"""Pause before a machine that has been lost is started again, doubled after each SSH that fails, and its maximum."""

ANY_PEER = ("192.0.2.1", 9)
"""Address that no machine has (RFC 5737), in the direction of the default route."""


class Nodes(Local):
    """The engine for several machines without a cluster."""

    inbox = None  # type: ignore[assignment] # workers elsewhere inherit no pipes

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> str | None:
        nodes_of(cfg)
        if cfg.elastic.max_workers not in (None, cfg.start_workers):
            return f"cfg.elastic.max_workers={cfg.elastic.max_workers}, but only machines in cfg.nodes can join"
        return "Ray places the workers of a job" if in_job else None

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Iterator[Cluster]:
        nodes = nodes_of(cfg)
        own = copy.copy(cfg)
        own.start_workers = nodes[0].slots
        title = f"on {len(nodes)} machines, {nodes[0].slots} of them on this one"
        here = this_machine(own)
        yield dataclasses.replace(here, title=title, host=_own_address(nodes[0], cfg.nodes))

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        super().__init__(cfg, cluster, timeout_s=timeout_s)
        self.key = os.environ.pop(KEY, "").strip() or secrets.token_urlsafe(24)  # workers do not need it
        if len(self.key.encode()) < KEY_BYTES:
            raise ConfigError(f"{KEY} has {len(self.key)} characters; use at least {KEY_BYTES}, or unset it")

    @staticmethod
    def sweep_engine(cfg: Any, **_: Any) -> Any:
        raise ConfigError(
            "cfg.engine=nodes trains no sweeps; their trials train on one machine, or on a cluster: "
            "mlx train launch --sweep"
        )

    def start(self, job: Any, handle: Handle, stop_asked: StopAsked) -> "NodesGroup":
        return NodesGroup(self, job, handle, stop_asked)


def _own_address(node: Node, setting: Any) -> str:
    if node.host is None:
        try:
            return address_towards(ANY_PEER)
        except OSError:
            raise ConfigError(
                "this machine has no route to others; list their addresses in a file: cfg.nodes=nodes.json"
            ) from None
    try:
        host = socket.gethostbyname(node.host)
        socket.create_server((host, 0)).close()
    except OSError:
        raise ConfigError(
            f"{setting} begins with {node.name}, and {node.host} is not an address of this machine. Run this there, or "
            "put this machine first"
        ) from None
    return host


class NodesGroup(LocalGroup):
    """The workers of all machines. If one of them is lost, all are restarted once all machines are there again.

    With `cfg.elastic.min_workers`, fewer machines train until then.
    """

    _engine: Nodes

    def __init__(self, engine: Nodes, job: Job, handle: Handle, stop_asked: StopAsked) -> None:
        self._nodes, self._stop_asked = nodes_of(engine.cfg), stop_asked
        self._step = strategy_class(engine.cfg.strategy).multiple_of(engine.cfg)
        self._rendezvous: Rendezvous | None = None
        self._starters: dict[str, subprocess.Popen[bytes]] = {}  # SSH, by name of the machine
        self._joined: set[str] = set()  # machines that have joined since SSH started them
        self._pauses: dict[str, tuple[float, float | None]] = {}  # before SSH starts a machine again: length, end
        self._ranks_of: dict[str, range] = {}  # in this attempt
        super().__init__(engine, job, handle)

    def poll(self) -> bool:
        assert self._rendezvous is not None, "it has started"
        if self._attempt is not None:
            if self._may_grow(self._attempt):
                self._kill()
                self._failed_at = None
                self._start()
            elif missing := self._rendezvous.missing():
                self._start_over_ssh(self._rendezvous, missing)
            return super().poll() if self._attempt is not None else True
        self._receive(self._rendezvous)
        self._forward_output()
        if self._stop_asked():
            raise Terminated
        missing = self._rendezvous.missing()
        there = [node for node in self._nodes if node not in missing]
        if not missing or self._is_enough(there := largest_group(there, self._step)):
            self._begin(self._rendezvous, there)
        elif time.monotonic() - self._waiting_since > (limit_s := self._engine.cfg.elastic.hang_timeout_s):
            names = ", ".join(_title(node) for node in missing)
            raise WorkerLostError(f"{names} did not join within {limit_s:g} s (cfg.elastic.hang_timeout_s)")
        else:
            self._start_over_ssh(self._rendezvous, missing)
        return True

    def _is_enough(self, there: list[Node]) -> bool:
        """Return True if training continues without machines that have not joined in time."""
        elastic, workers = self._engine.cfg.elastic, sum(node.slots or 0 for node in there)
        waited_s = time.monotonic() - self._waiting_since
        return elastic.min_workers is not None and elastic.min_workers <= workers and waited_s > elastic.wait_s

    def _may_grow(self, attempt: Any) -> bool:
        """Return True if all machines are there again, and no worker of those that train is about to end."""
        if len(self._ranks_of) == len(self._nodes) or attempt.codes or attempt.lost or self._stop_asked():
            return False
        ends = any(item.name.isdecimal() for item in attempt.results.iterdir())  # ranks with a result or an error
        return not ends and self._rendezvous is not None and not self._rendezvous.missing()

    def waits_for(self) -> str | None:
        missing = self._rendezvous.missing() if self._rendezvous is not None and self._attempt is None else []
        return f"{', '.join(map(_title, missing))} to join" if missing else None

    def close(self) -> None:
        super().close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        for starter in self._starters.values():
            starter.terminate()

    def _start(self) -> None:
        """Wait for all machines; `poll` starts the workers."""
        self._attempt, self._waiting_since = None, time.monotonic()
        if self._rendezvous is None:
            self._open()
        elif missing := self.waits_for():
            elastic = self._engine.cfg.elastic
            limit_s = elastic.hang_timeout_s if elastic.min_workers is None else elastic.wait_s
            self._handle(Notice(f"waiting   up to {limit_s:g} s for {missing} again"))

    def _open(self) -> None:
        engine, job = self._engine, self._job
        scratch = Path(self._scratch.name)
        key_file = scratch / "join.key"
        key_file.touch(0o600)
        key_file.write_text(f"{engine.key}\n")
        snapshots.store(job.project, RunFolder(scratch))
        self._code = scratch / snapshots.CODE
        gpus = job.cluster.gpus_per_worker if engine.use_gpu else 0
        try:
            self._rendezvous = Rendezvous(self._nodes, job.cluster.host, engine.key.encode(), self._offer(), gpus)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {job.cluster.host}:{self._nodes[0].port}: {error.strerror or error}; "
                "end the program that uses the port, or choose another one in nodes.json"
            ) from error
        if by_hand := [node for node in self._nodes[1:] if not node.ssh]:
            host, port = self._rendezvous.address
            where = "the other machine" if len(by_hand) == 1 else f"each of {len(by_hand)} other machines"
            self._handle(Notice(f"join      on {where}: mlx train join {host}:{port}"))
            self._handle(Notice(f"          which asks for the key in {key_file}, or reads it from {KEY}"))

    def _offer(self) -> dict[str, Any]:
        """Return the facts by which a machine finds the code and the storage, or finds that it lacks them."""
        with zipfile.ZipFile(self._code) as archive:
            files = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
        job, claim = self._job, attempt_name(self._job.run.attempt)
        try:
            mark = hashlib.sha256(job.folder.document(claim)).hexdigest()
        except (OSError, MlxError):
            mark = ""
        return {
            "files": files,
            "code": hashlib.sha256(self._code.read_bytes()).hexdigest(),
            "experiment": job.experiment,
            "preloads": strategy_class(self._engine.cfg.strategy).preloads,
            "storage": (job.root, job.run.experiment, job.run.name, claim, mark),
        }

    def _receive(self, rendezvous: Rendezvous) -> None:
        """Take the messages of the other machines."""
        for member, (kind, *facts) in rendezvous.messages():
            attempt = self._attempt
            if member is None:
                self._handle(Notice(f"refused   {facts[0]}"))
            elif kind == "ready":
                self._joined.add(member.node.name)
                self._pauses.pop(member.node.name, None)
                self._handle(Notice(f"joined    {member.title}"))
            elif kind == "code":
                member.send("code", self._code.read_bytes())
            elif kind == "failed":
                raise MlxError(f"{member.title}: {facts[0]}")
            elif kind == "lost":
                self._lose(member, facts[0])
            elif kind == "output":
                rank, to_stderr, content = facts
                os.write(self._output.writers[rank][to_stderr].fileno(), content)
            elif attempt is not None and facts[0] == self._number:  # otherwise it is about an earlier attempt
                _, rank, fact = facts
                if kind == "result":
                    part = attempt.results / f"{rank}.part"
                    part.write_bytes(fact)
                    part.replace(attempt.results / str(rank))
                elif kind == "exit":
                    attempt.codes[rank] = fact

    def _lose(self, member: Member, why: str) -> None:
        if self._attempt is None:
            self._handle(Notice(f"lost      {member.title}: {why}"))
            return
        for rank in self._ranks_of.get(member.node.name, ()):
            if rank not in self._attempt.codes:
                self._attempt.codes[rank] = -9
                self._attempt.lost[rank] = NodeLostError(f"{member.title} is lost: {why}")

    def _begin(self, rendezvous: Rendezvous, nodes: list[Node]) -> None:
        """Start the workers on some machines."""
        engine, job = self._engine, self._job
        members = dict(rendezvous.members)
        if any(node.name not in members for node in nodes[1:]):  # one has just been lost
            return
        members = {node.name: members[node.name] for node in nodes[1:]}
        first, self._ranks_of = 0, {}
        for node in nodes:
            self._ranks_of[node.name] = range(first, first := first + (node.slots or 0))
        self._ranks = range(first)
        blind = [member for member in members.values() if not member.sees_storage]
        _check_storage(blind, job, engine.cfg)
        self._begin_attempt()
        rendezvous.stores = {self._number: Values()}
        copied = _files_to_restore(job, engine.cfg) if blind else {}
        facts: dict[str, Any] = {
            "attempt": self._number,
            "world_size": len(self._ranks),
            "backend": backend_of(use_gpu=engine.use_gpu),
            "timeout_s": engine.timeout_s,
            "threads": engine.cfg.cpus_per_worker,
            "job": pickle.dumps(job),
        }
        for number, (name, member) in enumerate(members.items(), start=1):
            if not member.sees_storage:
                for path, (storage, parts) in copied.items():
                    member.send_all(_pieces(path, storage, parts))
            ranks = self._ranks_of[name]
            member.send("start", facts | {"ranks": ranks, "node": number, "name": name})
        if not self._number or len(nodes) < len(self._nodes):
            places = [f"{node.name}: {_span(self._ranks_of[node.name])}" for node in nodes]
            self._handle(Notice(f"machines  {', '.join(places)}"))
        store = partial(NetworkStore, rendezvous.address, rendezvous.key, self._number)
        self._start_here(self._ranks_of[nodes[0].name], store, job.cluster.host, nodes[0].name)

    def _collect_exits(self, attempt: Any, timeout_s: float = 0.0) -> None:
        super()._collect_exits(attempt, timeout_s)
        if self._rendezvous is not None:
            self._receive(self._rendezvous)

    def _killed(self) -> list[int]:
        if self._rendezvous is None or self._attempt is None:
            return []
        members = dict(self._rendezvous.members)
        for member in members.values():
            member.send("kill")
        left = super()._killed()
        for name, member in members.items():
            if {*left} & {*self._ranks_of.get(name, ())}:
                self._rendezvous.drop(member, "it did not end its workers")
        return [rank for rank in left if rank in self._ranks_of[self._nodes[0].name]]

    def _start_over_ssh(self, rendezvous: Rendezvous, missing: list[Node]) -> None:
        """Start machines with a destination for SSH; report the last line of an SSH that ends without joining.

        Before the first attempt that is an error; later, the machine may be starting.
        """
        for node in missing:
            if node.ssh is None or node.name in rendezvous.members:
                continue
            log = Path(self._scratch.name, f"{node.name}.log")
            starter = self._starters.get(node.name)
            if starter is not None and starter.poll() is None:
                continue
            if starter is not None and node.name not in self._joined:
                lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {starter.returncode}"]
                if self._number < 0:
                    raise MlxError(f"{node.name}: ssh {node.ssh} failed: {lines[-1]}")
                pause_s, end = self._pauses.get(node.name, (SSH_PAUSE_S / 2, None))
                if end is None:
                    pause_s = min(2 * pause_s, MAX_SSH_PAUSE_S)
                    self._pauses[node.name] = pause_s, time.monotonic() + pause_s
                    self._handle(Notice(f"ssh       {node.name}: {lines[-1]}; again in {pause_s:g} s"))
                if end is None or time.monotonic() < end:
                    continue
                self._pauses[node.name] = pause_s, None
            self._joined.discard(node.name)
            host, port = rendezvous.address
            words = [node.command, "train", "join", f"{host}:{port}", "--name", node.name, "--key-file", "-"]
            place = f"cd {shlex.quote(node.folder)} && " if node.folder else ""
            with log.open("wb") as output:
                self._starters[node.name] = starter = subprocess.Popen(
                    ["ssh", "-T", *SSH_OPTIONS, node.ssh, f"{place}exec {shlex.join(words)}"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches the workers through the driver
                )
            assert starter.stdin is not None
            with contextlib.suppress(OSError), starter.stdin:  # never on a command line, which `ps` shows
                starter.stdin.write(f"{self._engine.key}\n".encode())


class NodeLostError(Exception):
    """A machine is gone, with its workers."""


def largest_group(nodes: list[Node], step: int) -> list[Node]:
    """Return the first machine and others that have the most workers whose number is a multiple of `step`, or none."""
    chosen = {nodes[0].slots or 0: nodes[:1]}  # by number of workers
    for node in nodes[1:]:
        chosen = {workers + (node.slots or 0): [*group, node] for workers, group in chosen.items()} | chosen
    return chosen[max(fitting)] if (fitting := [workers for workers in chosen if workers % step == 0]) else []


def _title(node: Node) -> str:
    return f"{node.name} ({node.host})" if node.host else node.name


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _files_to_restore(job: Job, cfg: Any) -> dict[str, tuple[Storage, tuple[str, ...]]]:
    """Return the files of the checkpoint that the workers will restore, by their path below a storage.

    The first rank chooses the same one, or reports that it is damaged.
    """
    run, path = join_path(job.run.experiment, job.run.name, "checkpoints"), cfg.restore_checkpoint_path
    with contextlib.suppress(MlxError, OSError):
        newest = CheckpointStore(job.folder.checkpoints).newest(lambda text: None)
        if newest is not None:
            storage, folder = storage_at(job.folder.checkpoints), newest[0].name
            return {f"{run}/{folder}/{name}": (storage, (folder, name)) for name in storage.names(folder)}
        if path and not is_remote(path) and not is_uri(path):
            storage, folder = parent_of(path)
            return {f"{RESTORED}/{name}": (storage, (folder, name)) for name in storage.names(folder)}
    return {}


def _pieces(path: str, storage: Storage, parts: tuple[str, ...]) -> Iterator[Message]:
    """Yield the messages with the content of a file, for a machine that does not see the storage."""
    with storage.open(*parts) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield "file", path, chunk


def stores_shards(strategy: str) -> bool:
    """Return True if each worker writes its part of checkpoints; otherwise rank 0 writes them."""
    kind = strategy_class(strategy)
    return getattr(kind, "stores_shards", kind.shards)


def _check_storage(blind: list[Member], job: Job, cfg: Any) -> None:
    """Refuse to train if machines that do not see the storage of the run would have to use it."""
    if not blind:
        return
    why = ""
    names = strategy_names(cfg, job.tree.get("models"))
    if any(map(stores_shards, names)):
        why = f"cfg.strategy={cfg.strategy} needs, since each worker writes its shards; share it, or use ddp"
    elif any(not is_uri(item.root) for item in job.prepared.values()):
        why = "prepared datasets are read from; share it, or add --no-prepared"
    if why:
        raise ConfigError(f"{blind[0].title} does not see the storage {job.root}, which {why}")
