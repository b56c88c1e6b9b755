"""Replicas without connections to each other, which meet in a folder or an object store.

    meeting.json               what all replicas have in common: model, code and outer optimizer; created once
    members/NAME.json          heartbeat of a replica
    rounds/000009/NAME-SHA.bin     its compressed difference from the common weights
    rounds/000009/NAME.json        size and SHA-256 of that file, number of updates; created once
    rounds/000009/closed.json      the differences whose mean is taken; created once, by any replica
    snapshots/000008.json      size and SHA-256 of a file with the common weights after 8 rounds; created once
    snapshots/SHA.bin          that file

`closed.json` decides a round. It is created exclusively, so a replica that was given up and wakes up cannot change it:
its difference is not listed, and it takes the common weights. All replicas compute the same bits from the same files,
so weights travel only to replicas that are new, or that missed too much.

Files are read as if an enemy had written them: within limits, without running code, and only with the expected hash,
names, types, shapes and finite values. Whoever can write to the folder can still contribute harmful numbers.
"""

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mlx_runtime.companions.fragments.averaging import Tensors, outer_step
from mlx_runtime.companions.fragments.traffic import Compressor, Payload
from mlx_runtime.distributed.messages import decode, encode
from mlx_runtime.errors import ConfigError, MlxError, StorageError, short_message
from mlx_runtime.storage.documents import COUNT, NUMBER, TEXT, TIME, from_json, list_of, mapping_with, one_of
from mlx_runtime.storage.files import Storage, storage_at, to_json
from mlx_runtime.storage.leases import HEARTBEAT_S, STALE_S, heartbeat, is_alive, lease, this_process
from mlx_runtime.storage.publishing import create_whole

if TYPE_CHECKING:
    from mlx_runtime.loop.job import Job

T = TypeVar("T")

SNAPSHOT_EVERY = 8
"""Rounds between two snapshots of the common weights. Files of rounds before the last two are removed."""

OUTAGE_S = 600.0
"""Maximum time that the storage may not answer, in seconds."""

MISTAKES = (FileNotFoundError, NotADirectoryError, FileExistsError, PermissionError)
"""Errors of a new replica that waiting does not help: its folder cannot be created."""

DOCUMENT_BYTES = 1 << 20
"""Maximum size of a JSON file, for a few thousand replicas."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}-[0-9a-f]{8}")
SHA = re.compile(r"[0-9a-f]{64}")

_PART = {
    **{"replica": TEXT, "sha256": TEXT, "size_bytes": COUNT, "updates": COUNT, "base": TEXT},
    "traffic": one_of("none", "fp16", "topk"),
}
_CLOSED = {"round": COUNT, "closer": TEXT, "base": TEXT, "parts": list_of(mapping_with(_PART, tuple(_PART)))}
_MEMBER = {"host": TEXT, "pid": COUNT, "heartbeat": TIME, "seed": COUNT}
_SNAPSHOT = {"sha256": TEXT, "size_bytes": COUNT}
_MEETING = {"format": COUNT, "model": TEXT, "code": TEXT, "lr": NUMBER, "momentum": NUMBER}


@contextlib.contextmanager
def enter(session: Any, job: "Job", sink: Any) -> Iterator["Meeting"]:
    """Return the meeting of this run, and leave it at the end of the block, so that nobody waits for this replica."""
    context = session.context
    wanted, host = context.cfg.replicas, this_process()["host"]
    storage = storage_at(wanted.meet)
    digest = hashlib.sha256(f"{host}:{job.folder.location}".encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{host}-{job.run.name}")[:100]
    made = Meeting(
        storage,
        f"{name}-{digest}",
        {"format": 1, "code": code_digest(job.project), "lr": float(wanted.lr), "momentum": float(wanted.momentum)},
        seed=context.cfg.seed,
        beat=session.beat,
        stop_asked=sink.stop_asked,
        notice=session.reporter.notice,
    )
    with made.stack:
        yield made


def code_digest(project: Path) -> str:
    """Return the digest of the modules in `src` of a project."""
    digest = hashlib.sha256()
    for file in sorted((project / "src").rglob("*.py")):
        digest.update(f"{file.relative_to(project).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


class Meeting:
    """The place where a replica publishes its differences, and computes the common weights.

    Args:
        storage: the folder or the prefix of an object store.
        name: unique name of the replica, which stays the same when its run is resumed.
        facts: what must be equal for all replicas, besides the model.
        seed: seed of the order of the replica's rows, which should differ.
        beat: called while this replica waits.
        stop_asked: returns True if it should stop waiting.
        notice: shows a line to the user.
        timeout_s: time without a heartbeat after which the others stop waiting for a replica.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        facts: Mapping[str, Any],
        *,
        seed: int = 0,
        beat: Callable[[], None] = lambda: None,
        stop_asked: Callable[[], bool] = lambda: False,
        notice: Callable[[str], None] = print,
        timeout_s: float = STALE_S,
    ) -> None:
        if not storage.exclusive:
            raise ConfigError(
                f"cfg.replicas.meet={storage.root} needs a storage that creates a file only once; use a folder or S3"
            )
        self.stack = contextlib.ExitStack()
        self.name, self.rounds = name, 0
        self.common: torch.Tensor | None = None  # parameters and buffers after these rounds
        self.momentum: torch.Tensor | None = None
        self.moved = False  # the last call has changed the common weights
        self.numbers: dict[str, float] = {}  # of the last round
        self._storage, self._facts, self._seed = storage, dict(facts), seed
        self._beat, self._stop_asked, self._notice, self._timeout_s = beat, stop_asked, notice, timeout_s
        self._poll_s = 0.1 if storage.local else 2.0
        self._heard: dict[str, tuple[str, float]] = {}  # last heartbeat of each replica, and when it was read here
        self._read: dict[str, torch.Tensor] = {}  # differences of the current round, by SHA-256
        self._sent_bytes = self._received_bytes = 0  # of the current round
        self._published_at = time.monotonic()
        self._unpublished: Callable[[], None] | None = None
        self._outage_since: float | None = None

    # -- called by a replica

    def join(self, tensors: Tensors, common: torch.Tensor, momentum: torch.Tensor | None, rounds: int) -> None:
        """Join with the weights of a checkpoint, or of a new run, whose weights those of the others replace."""
        odd = [path for path, item in tensors.all.items() if item.dtype != torch.float32]
        if odd:
            raise ConfigError(f"cfg.replicas.meet averages float32 weights; {odd[0]} is {tensors.all[odd[0]].dtype}")
        self._exact, self._compressor = tensors.exact, tensors.compressor
        described = [[path, list(item.shape)] for path, item in tensors.all.items()]
        self._facts["model"] = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
        self.common, self.momentum, self.rounds = common, momentum, rounds
        before = self._digest(), rounds
        try:
            self._patiently(self._agree, at_once=MISTAKES)
        except MISTAKES as error:
            raise ConfigError(
                f"cannot meet at {self._storage.root}: {short_message(error)}; set cfg.replicas.meet to a folder that "
                "all machines can write to, or to a URI like s3://bucket/m"
            ) from error
        self._announce()
        self.stack.callback(self._leave)
        self.stack.enter_context(heartbeat(self._announce, min(HEARTBEAT_S, self._timeout_s / 4)))
        self._patiently(lambda: self._join(rounds))
        self.moved = before != (self._digest(), self.rounds)
        others = sorted(self._patiently(self._alive) - {self.name})
        where = f"round {self.rounds + 1} at {self._storage.root}"
        self._notice(f"replicas  joined {where} as {self.name}; with {', '.join(others) or 'nobody else yet'}")

    def _join(self, rounds: int) -> None:
        newest = self._newest()
        if rounds > newest:
            raise ConfigError(
                f"{self._storage.root} has seen {newest} rounds, but this run took part in {rounds}; name the folder "
                "where it met the others"
            )
        if rounds == 0:
            if not self._snapshots():
                self._publish_snapshot()
            self._load_snapshot()
        self._catch_up()

    def publish(self, payload: Payload, traffic: str | None, updates: int) -> None:
        """Publish the compressed difference of this replica in the current round, once."""
        if not all(bool(item.isfinite().all()) for item in payload.values() if item.is_floating_point()):
            raise MlxError("weights of this replica are not finite, so none were published; lower the learning rate")
        content = encode({name: item.contiguous() for name, item in payload.items()})
        sha256 = hashlib.sha256(content).hexdigest()
        part = {"replica": self.name, "sha256": sha256, "size_bytes": len(content), "updates": updates}
        part |= {"base": self._digest(), "traffic": traffic or "none"}

        def publish() -> None:
            self._write(content, *self._round(), f"{self.name}-{sha256[:16]}.bin")
            self._create(part, *self._round(), f"{self.name}.json")  # unless the run did before it was resumed

        self._sent_bytes, self._received_bytes, self._published_at = len(content), 0, time.monotonic()
        self._read[sha256] = self._compressor(traffic).expand(payload)
        self._unpublished = publish
        self._attempt(self._publish)

    def _publish(self) -> None:
        if self._unpublished is not None:
            self._unpublished()
            self._unpublished = None

    def wait(self, limit_s: float = math.inf) -> bool | None:
        """Wait until the round is closed, and take the new common weights.

        Return False if the run should stop, and None after `limit_s`, with the round still open.
        """
        number, called = self.rounds + 1, time.monotonic()
        while (closed := self._attempt(lambda: self._follow(number))) is None:
            if self._stop_asked():
                if self._unpublished is not None:  # a resumed run would wait for its own part
                    raise StorageError(f"cannot meet at {self._storage.root}, which does not answer")
                return False
            if time.monotonic() - called > limit_s:
                return None
            self._beat()
            time.sleep(self._poll_s)
        self.moved = True
        parts = {item["replica"]: item["updates"] for item in closed["parts"]}
        if self.name not in parts:
            self._notice(
                f"replicas  round {number} was closed without this replica; continuing with the common weights"
            )
        self.numbers = {
            "round": self.rounds,
            "averaged": len(parts),
            "bytes": self._sent_bytes,
            "received_bytes": self._received_bytes,
            "updates": parts.get(self.name, 0),
            "updates_of_all": sum(parts.values()),
            "wait_s": time.monotonic() - self._published_at,
        }
        if closed.get("closer") == self.name:
            self._attempt(self._tidy)
        return True

    # -- rounds

    def _follow(self, number: int) -> dict[str, Any] | None:
        """Take the weights of a round, and return its parts, or None if it is open."""
        self._publish()
        if self._newest() < number and not self._close(number):
            return None
        closed = self._closed(number)
        self._catch_up()
        return closed or {"parts": []}

    def _close(self, number: int) -> bool:
        """Close a round if all living replicas have taken part. Return True if it is closed."""
        parts: dict[str, dict[str, Any]] = {}
        for file in self._storage.names(*self._round(number)):
            name = file.removesuffix(".json")
            if file.endswith(".json") and NAME.fullmatch(name):
                with contextlib.suppress(ValueError, FileNotFoundError):  # it counts as missing
                    parts[name] = self._document(_PART, *self._round(number), file)
        if self._alive() - parts.keys():
            return False
        good = []
        for name, part in sorted(parts.items()):
            try:
                if part["replica"] != name:
                    raise ValueError("it names another replica")
                self._difference(number, part)
                good.append(part)
            except ValueError as error:
                self._notice(f"replicas  the difference of {name} in round {number} is ignored: {error}")
        if not good:
            return False
        base = self._digest()
        self._create(
            {"round": number, "closer": self.name, "base": base, "parts": good}, *self._round(number), "closed.json"
        )
        return True

    def _closed(self, number: int) -> dict[str, Any] | None:
        """Return the decision about a round, or None if there is none, or its files were removed."""
        try:
            return self._document(_CLOSED, *self._round(number), "closed.json")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise MlxError(f"closed.json of round {number} at {self._storage.root} is damaged: {error}") from error

    def _catch_up(self) -> None:
        """Compute the common weights after all closed rounds, from a snapshot if files are missing."""
        newest = self._newest()
        if self.rounds < newest:
            closed = self._closed(self.rounds + 1)
            if closed is None or closed["base"] != self._digest():
                self._load_snapshot()
        while self.rounds < newest:
            number = self.rounds + 1
            closed = self._closed(number)
            if closed is None or closed["base"] != self._digest() or not closed["parts"]:
                raise MlxError(f"round {number} at {self._storage.root} does not follow from the rounds before it")
            try:
                found = [self._difference(number, part) for part in closed["parts"]]
            except ValueError as error:
                raise MlxError(f"round {number} at {self._storage.root} is damaged: {error}") from error
            total = found[0].clone()
            for item in found[1:]:
                total.add_(item)
            self._step(total.div_(len(found)))
            self._read.clear()

    def _step(self, mean: torch.Tensor) -> None:
        assert self.common is not None
        facts = self._facts
        self.common, self.momentum = outer_step(
            self.common, self.momentum, mean, self._exact, facts["lr"], facts["momentum"]
        )
        self.rounds += 1

    def _newest(self) -> int:
        """Return the number of the last closed round, or 0."""
        for name in reversed(self._storage.names("rounds")):
            if re.fullmatch(r"\d{6}", name) and self._storage.size_bytes("rounds", name, "closed.json") is not None:
                return int(name)
        return 0

    def _difference(self, number: int, part: Mapping[str, Any]) -> torch.Tensor:
        """Read a difference. Raises ValueError if it is not what a replica of this model would publish."""
        sha256, name = part["sha256"], part["replica"]
        if not SHA.fullmatch(sha256) or not NAME.fullmatch(name) or part["updates"] < 0:
            raise ValueError("its description is odd")
        if part["base"] != self._digest():
            raise ValueError("it starts from other weights")
        if sha256 not in self._read:
            compressor: Compressor = self._compressor(None if part["traffic"] == "none" else part["traffic"])
            shapes = compressor.compressed_shapes().values()
            limit = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes) + 4096
            payload = self._tensors(limit, part, *self._round(number), f"{name}-{sha256[:16]}.bin")
            if problem := compressor.problem(payload):
                raise ValueError(problem)
            self._read[sha256] = compressor.expand(payload)
        return self._read[sha256]

    # -- snapshots

    def _snapshots(self) -> list[int]:
        names = self._storage.names("snapshots")
        return sorted(int(name[:6]) for name in names if re.fullmatch(r"\d{6}\.json", name))

    def _publish_snapshot(self) -> None:
        assert self.common is not None
        content = encode({"common": self.common, "momentum": self.momentum})
        sha256 = hashlib.sha256(content).hexdigest()
        self._write(content, "snapshots", f"{sha256}.bin")
        self._create({"sha256": sha256, "size_bytes": len(content)}, "snapshots", f"{self.rounds:06}.json")

    def _load_snapshot(self) -> None:
        """Take the common weights of the newest snapshot."""
        assert self.common is not None
        size = len(self.common)
        where = f"the snapshot at {self._storage.root}"
        if not (numbers := self._snapshots()):
            raise MlxError(f"{where} is missing")
        try:
            about = self._document(_SNAPSHOT, "snapshots", f"{numbers[-1]:06}.json")
            if not SHA.fullmatch(about["sha256"]):
                raise ValueError("its description is odd")
            state = self._tensors(8 * size + 4096, about, "snapshots", f"{about['sha256']}.bin")
            wanted = {"common": size, "momentum": size - self._exact}
            if not isinstance(state, dict) or state.keys() != wanted.keys() or state["common"] is None:
                raise ValueError("it lacks the common weights")
            for name, count in wanted.items():
                item = state[name]
                if item is None:
                    continue
                if not isinstance(item, torch.Tensor) or item.shape != (count,) or item.dtype != torch.float32:
                    raise ValueError(f"{name} is not a float32 tensor of {count} values")
                if not bool(item.isfinite().all()):
                    raise ValueError(f"{name} has values that are not finite")
        except ValueError as error:
            raise MlxError(f"{where} is damaged: {error}") from error
        self.common, self.momentum, self.rounds = state["common"], state["momentum"], numbers[-1]

    def _tidy(self) -> None:
        """Publish a snapshot now and then, and remove files that nobody needs any more."""
        numbers = self._snapshots()
        if self.rounds - max(numbers, default=0) < SNAPSHOT_EVERY:
            return
        self._publish_snapshot()
        oldest = max(numbers, default=0)
        for name in self._storage.names("rounds"):
            if re.fullmatch(r"\d{6}", name) and int(name) <= oldest:
                with contextlib.suppress(OSError):
                    self._storage.remove_folder("rounds", name)
        for number in numbers[:-1]:
            with contextlib.suppress(ValueError, OSError):
                about = self._document(_SNAPSHOT, "snapshots", f"{number:06}.json")
                if SHA.fullmatch(about["sha256"]):
                    self._storage.remove_file("snapshots", f"{about['sha256']}.bin")
                self._storage.remove_file("snapshots", f"{number:06}.json")

    # -- members

    def _agree(self) -> None:
        """Raise ConfigError if this replica differs from the others in a way that makes averages meaningless."""
        self._create(self._facts, "meeting.json")
        try:
            theirs = self._document(_MEETING, "meeting.json")
        except ValueError as error:
            raise ConfigError(f"meeting.json at {self._storage.root} is damaged: {error}") from error
        titles = {"model": "shapes of models", "code": "code in src"}
        for key, mine in self._facts.items():
            if theirs[key] != mine:
                what = titles.get(key, f"cfg.replicas.{key}")
                raise ConfigError(
                    f"the replicas at {self._storage.root} differ in {what} ({theirs[key]}, here {mine}); use the "
                    "same on all machines, or another cfg.replicas.meet"
                )

    def _announce(self) -> None:
        with contextlib.suppress(OSError):
            record = lease(replica=self.name, rounds=self.rounds, seed=self._seed)
            self._write(to_json(record).encode(), "members", f"{self.name}.json")

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self._storage.remove_file("members", f"{self.name}.json")

    def _alive(self) -> set[str]:
        """Return the names of the replicas that show signs of life, this one included.

        Clocks of machines may differ, so heartbeats are compared with those read here earlier.
        """
        found, here, now = {self.name}, this_process()["boot"], time.monotonic()
        for file in self._storage.names("members"):
            name = file.removesuffix(".json")
            if not NAME.fullmatch(name) or name == self.name:
                continue
            try:
                record = self._document(_MEMBER, "members", file)
            except (ValueError, FileNotFoundError):
                continue
            if self._heard.get(name, ("", 0.0))[0] != record["heartbeat"]:
                if name not in self._heard and record["seed"] == self._seed:
                    self._notice(f"replicas  {name} reads its rows with the same seed; set another cfg.seed")
                self._heard[name] = record["heartbeat"], now
            is_gone = here is not None and record.get("boot") == here and not is_alive(record)
            if not is_gone and now - self._heard[name][1] < self._timeout_s:
                found.add(name)
        return found

    # -- files

    def _round(self, number: int | None = None) -> tuple[str, str]:
        return "rounds", f"{self.rounds + 1 if number is None else number:06}"

    def _digest(self) -> str:
        """Return the digest of the common parameters; buffers are no part of differences."""
        assert self.common is not None
        params = self.common[: len(self.common) - self._exact].contiguous()
        return hashlib.sha256(params.numpy().tobytes()).hexdigest()[:16]

    def _document(self, shape: Mapping[str, Any], *parts: str) -> dict[str, Any]:
        with self._storage.open(*parts) as stream:
            content = stream.read(DOCUMENT_BYTES + 1)
        if len(content) > DOCUMENT_BYTES:
            raise ValueError(f"it has more than {DOCUMENT_BYTES:,} bytes")
        return from_json(content, shape, tuple(shape))

    def _tensors(self, limit: int, about: Mapping[str, Any], *parts: str) -> Any:
        """Return the tensors in a file of at most `limit` bytes. Raises ValueError if it is not as described."""
        size = about["size_bytes"]
        if not 0 < size <= limit:
            raise ValueError(f"it has {size:,} bytes, not at most {limit:,}")
        try:
            with self._storage.open(*parts) as stream:
                content = stream.read(size + 1)
        except FileNotFoundError:
            raise ValueError("its file is missing") from None
        if len(content) != size or hashlib.sha256(content).hexdigest() != about["sha256"]:
            raise ValueError("its file has changed")
        self._received_bytes += size
        return decode(content)

    def _write(self, content: bytes, *parts: str) -> None:
        self._make_folder(*parts[:-1])
        self._storage.write(content, *parts)

    def _create(self, document: Mapping[str, Any], *parts: str) -> bool:
        """Create a file unless it exists; it never exists without its full content."""
        self._make_folder(*parts[:-1])
        content = to_json(document).encode()
        if self._storage.local:
            return create_whole(Path(self._storage.of(*parts)), content)
        return self._storage.create_exclusively(content, *parts)

    def _make_folder(self, *parts: str) -> None:
        if self._storage.local:
            Path(self._storage.of(*parts) if parts else self._storage.path).mkdir(parents=True, exist_ok=True)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Return the result of an action, or None during an outage of the storage."""
        try:
            result = action()
        except OSError as error:
            if self._outage_since is None:
                self._outage_since = time.monotonic()
                self._complain(error)
            if time.monotonic() - self._outage_since > OUTAGE_S:
                raise StorageError(f"cannot meet at {self._storage.root}: {short_message(error)}") from error
            return None
        self._outage_since = None
        return result

    def _complain(self, error: OSError) -> None:
        reason = short_message(error)
        self._notice(f"replicas  {self._storage.root} does not answer ({reason}); trying for {OUTAGE_S / 60:.0f} min")

    def _patiently(self, action: Callable[[], T], at_once: tuple[type[OSError], ...] = ()) -> T:
        """Return the result of an action that may be repeated, also after an outage of the storage.

        Errors of the types `at_once` are raised.
        """
        deadline = time.monotonic() + OUTAGE_S
        while True:
            try:
                return action()
            except OSError as error:
                if isinstance(error, at_once):
                    raise
                if time.monotonic() > deadline or self._stop_asked():
                    raise StorageError(f"cannot meet at {self._storage.root}: {short_message(error)}") from error
                self._complain(error)
                self._beat()
                time.sleep(5.0)
