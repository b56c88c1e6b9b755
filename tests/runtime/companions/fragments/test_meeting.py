"""Replicas that meet in a folder or on S3 agree on every round, whoever dies, wakes up or lies."""

import contextlib
import hashlib
import json
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Start
from faults import final_state
from torch import nn

from mlx_runtime.companions.fragments import meeting
from mlx_runtime.companions.fragments.averaging import Tensors
from mlx_runtime.companions.fragments.meeting import Meeting
from mlx_runtime.distributed.messages import encode
from mlx_runtime.errors import ConfigError, MlxError, StorageError
from mlx_runtime.storage.files import storage_at
from mlx_runtime.storage.leases import lease

FACTS = {"format": 1, "lr": 0.7, "momentum": 0.9}

A, B = "laptop-run_001-aaaaaaaa", "desktop-run_001-bbbbbbbb"


class Replica:
    """A model with a buffer, at a meeting. Its updates add a number to each weight."""

    def __init__(self, root: str, name: str, seed: int = 0, code: str = "", **options: Any) -> None:
        torch.manual_seed(seed)
        self.model, self.notices = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False)), []
        optimizer = torch.optim.SGD(self.model.parameters())
        self.tensors = Tensors({"net": self.model}, optimizer)
        options = {"timeout_s": 0.6, "notice": self.notices.append} | options
        self.meeting = Meeting(storage_at(root), name, FACTS | {"code": code}, seed=seed, **options)
        self.momentum: torch.Tensor | None = None

    def join(self, rounds: int = 0) -> "Replica":
        self.meeting.join(self.tensors, self.tensors.vector(), self.momentum, rounds)
        return self.take()

    def take(self) -> "Replica":
        assert self.meeting.common is not None
        self.tensors.fill(self.meeting.common)
        return self

    def publish(self, change: float, traffic: str | None = None) -> None:
        assert self.meeting.common is not None
        with torch.no_grad():
            for item in self.tensors.all.values():
                item.add_(change)
        difference = self.tensors.difference(self.meeting.common)
        self.meeting.publish(self.tensors.compressor(traffic).compress(difference), traffic, 5)

    @property
    def weights(self) -> torch.Tensor:
        return self.tensors.vector()


@pytest.fixture
def joined() -> Iterator[Callable[..., Replica]]:
    with contextlib.ExitStack() as stack:

        def joined(*arguments: Any, rounds: int = 0, **options: Any) -> Replica:
            made = Replica(*arguments, **options)
            stack.enter_context(made.meeting.stack)
            return made.join(rounds)

        yield joined


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else request.getfixturevalue("s3").format(tmp_path.name)


@pytest.mark.process
def test_replicas_agree_on_every_round(
    place: str, joined: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SNAPSHOT_EVERY", 2)
    one, two = (joined(place, name, seed=seed, timeout_s=60) for seed, name in enumerate((A, B), 1))
    first = one.weights.clone()
    assert torch.equal(two.weights, first)  # those of the first replica
    one.publish(1.0)
    two.publish(3.0, "fp16")
    assert two.meeting.wait()
    assert one.meeting.wait()
    assert torch.equal(one.take().weights, two.take().weights)
    assert torch.allclose(one.weights[:8], first[:8] + 0.7 * 1.9 * 2.0, atol=1e-3)  # Nesterov momentum
    assert torch.allclose(one.weights[8:], first[8:] + 2.0, atol=1e-6)  # running mean and variance
    assert one.meeting.numbers["averaged"] == 2
    assert one.meeting.numbers["updates_of_all"] == 10
    two.meeting.stack.close()
    for _ in range(4):  # alone, until the files of the first rounds are removed
        one.publish(0.1)
        assert one.meeting.wait()
        one.take()
    names = storage_at(place).names
    assert names("rounds")[0] == "000003"
    assert len(names("snapshots")) == 4
    late = joined(place, "other-run_002-cccccccc", seed=3)
    assert torch.equal(late.weights, one.weights)
    two.publish(9.0)  # it missed everything
    assert two.meeting.wait()
    assert torch.equal(two.take().weights, one.weights)


@pytest.mark.process
def test_a_replica_that_was_given_up_cannot_change_a_round(tmp_path: Path, joined: Callable[..., Replica]) -> None:
    one, two = joined(str(tmp_path), A), joined(str(tmp_path), B, seed=1)
    started = time.monotonic()
    sleeping = lease(replica=B, rounds=0, seed=1) | {"boot": "another machine"}
    two.meeting.stack.close()
    (tmp_path / "members" / f"{B}.json").write_text(json.dumps(sleeping))
    one.publish(1.0)
    assert one.meeting.wait()
    assert time.monotonic() - started > 0.3
    one.take()
    closed = (tmp_path / "rounds" / "000001" / "closed.json").read_bytes()
    two.publish(5.0)
    assert two.meeting.wait()
    assert (tmp_path / "rounds" / "000001" / "closed.json").read_bytes() == closed
    assert torch.equal(two.take().weights, one.weights)
    assert "without this replica" in two.notices[-1]


@pytest.mark.process
def test_a_folder_that_cannot_be_created_is_refused_at_once(tmp_path: Path, joined: Callable[..., Replica]) -> None:
    (tmp_path / "nodes.json").touch()
    with pytest.raises(ConfigError, match=r"cannot meet at .*nodes\.json: .*set cfg\.replicas\.meet to a folder"):
        joined(str(tmp_path / "nodes.json"), A)


@pytest.mark.process
def test_a_replica_can_be_stopped_during_an_outage(tmp_path: Path, joined: Callable[..., Replica]) -> None:
    stops: list[bool] = []
    one = joined(str(tmp_path), A, stop_asked=lambda: bool(stops))
    rounds, away = tmp_path / "rounds", tmp_path / "away"
    one.publish(1.0)
    rounds.rename(away)
    rounds.touch()  # instead of the folder
    assert one.meeting.wait(0.2) is None
    stops.append(True)
    assert one.meeting.wait() is False
    stops.clear()
    rounds.unlink()
    away.rename(rounds)
    assert one.meeting.wait()
    rounds.rename(away)
    rounds.touch()
    one.publish(1.0)
    assert one.meeting.wait(0.2) is None
    stops.append(True)
    with pytest.raises(StorageError, match="does not answer"):
        one.meeting.wait()
    stops.clear()
    rounds.unlink()
    away.rename(rounds)
    assert one.meeting.wait()
    assert one.meeting.rounds == 2


LIES = {
    "pickled code": pickle.dumps(print),
    "not finite": encode({"values": torch.full((12,), torch.nan)}),
    "another shape": encode({"values": torch.zeros(13)}),
    "another type": encode({"values": torch.zeros(12, dtype=torch.float64)}),
    "another tensor": encode({"weights": torch.zeros(12)}),
    "a huge header": b"\xff" * 40,
    "a large file": b" " * 10_000,
}


@pytest.mark.process
@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_files_are_not_trusted(content: bytes, tmp_path: Path, joined: Callable[..., Replica]) -> None:
    one = joined(str(tmp_path), A)
    before = one.weights.clone()
    one.publish(1.0)
    folder, sha256 = tmp_path / "rounds" / "000001", hashlib.sha256(content).hexdigest()
    (folder / f"{B}-{sha256[:16]}.bin").write_bytes(content)
    mine = json.loads((folder / f"{A}.json").read_text())
    lie = mine | {"replica": B, "sha256": sha256, "size_bytes": len(content)}
    (folder / f"{B}.json").write_text(json.dumps(lie))
    (folder / "readme.json").write_text("no replica")
    assert one.meeting.wait()
    assert torch.allclose(one.take().weights[:8], before[:8] + 0.7 * 1.9, atol=1e-5)
    assert f"the difference of {B} in round 1 is ignored" in one.notices[-1]
    (folder / f"{A}-{mine['sha256'][:16]}.bin").write_bytes(content)
    with pytest.raises(MlxError, match="round 1 at .* is damaged: its file has changed"):
        joined(str(tmp_path), B)


@pytest.mark.process
def test_another_experiment_is_refused(tmp_path: Path, joined: Callable[..., Replica]) -> None:
    joined(str(tmp_path), A)
    with pytest.raises(ConfigError, match="differ in code in src .*; use the same on all machines"):
        joined(str(tmp_path), B, code="another")
    other = Replica(str(tmp_path), B)
    other.model[0] = nn.Linear(4, 2)
    other.tensors = Tensors({"net": other.model}, torch.optim.SGD(other.model.parameters()))
    with pytest.raises(ConfigError, match="differ in shapes of models"):
        other.join()
    with pytest.raises(ConfigError, match="has seen 0 rounds, but this run took part in 3"):
        joined(str(tmp_path), B, rounds=3)
    with pytest.raises(ConfigError, match="a storage that creates a file only once"):
        Meeting(SimpleNamespace(exclusive=False, root="gs://b"), A, FACTS)  # type: ignore[arg-type]


def parts_of(folder: Path) -> dict[int, set[str]]:
    """The replicas in each closed round whose files still exist."""
    found = {}
    for file in folder.glob("rounds/*/closed.json"):
        with contextlib.suppress(FileNotFoundError):
            parts = json.loads(file.read_text())["parts"]
            found[int(file.parent.name)] = {item["replica"] for item in parts}
    return found


def await_rounds(folder: Path, wanted: Callable[[dict[int, set[str]]], bool]) -> None:
    deadline = time.monotonic() + 240
    while not wanted(parts_of(folder)):
        assert time.monotonic() < deadline, parts_of(folder)
        time.sleep(0.02)


@pytest.mark.kills
def test_a_run_is_killed_and_meets_the_others_again(
    start: Start, experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    """The other run continues alone. Both take different numbers of steps per round."""
    folder, place = experiment("faults"), tmp_path / "meeting"
    shared = ("train", "run", "cfg.start_workers=0", "cfg.trackers={}", f"cfg.replicas.meet={place}")
    shared += ("cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9", "cfg.replicas.traffic=topk")
    steady = start(folder, *shared, "cfg.replicas.every=2", "cfg.num_epochs=8", "cfg.pause_s=0.3")
    await_rounds(place, lambda rounds: 1 in rounds)
    often = ("cfg.seed=1", "cfg.replicas.every=3", "cfg.checkpoint_every_steps=1", "cfg.num_epochs=100")
    killed = start(folder, *shared, *often, "cfg.pause_s=0.02")
    await_rounds(place, lambda rounds: sum(len(names) == 2 for names in rounds.values()) >= 2)
    killed.kill()
    killed.wait()
    before = max(parts_of(place))
    await_rounds(place, lambda rounds: len(rounds.get(before + 3, {1, 2})) == 1)
    resumed = start(folder, "train", "run", "--resume=run_002", "cfg.num_epochs=100")
    await_rounds(place, lambda rounds: any(len(names) == 2 for number, names in rounds.items() if number > before + 3))
    resumed.send_signal(signal.SIGINT)
    resumed.wait()
    (folder / "diary" / "hurry").touch()
    steady.wait()
    assert steady.returncode == 0
    lines = (folder / "runs" / "faults" / "run_001" / "metrics.jsonl").read_text().splitlines()
    found = [
        (item["replicas/averaged"], item["replicas/updates_of_all"])
        for item in map(json.loads, lines)
        if "replicas/round" in item
    ]
    assert {*found} == {(1, 2), (2, 5)}
    alone = [number for number, item in enumerate(found) if item[0] == 1]
    assert alone[-1] - alone[0] > len(alone)  # with the other replica in between
    assert not list((place / "members").glob("*.json"))
    assert final_state(folder / "runs" / "faults" / "run_001")["own"]["replicas_common"]["adam"]["rounds"] == 64
