"""A cluster that grows: Ray's autoscaler starts nodes on this machine, from a head without CPUs to two, and back."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from clusters import RayCluster
from forkserver import Commands

from mlx_runtime.companions.ray.autoscaler import NodeType, Room, activities
from mlx_runtime.companions.ray.failures import failure_of
from mlx_runtime.companions.ray.preflight import capacity_check
from mlx_runtime.companions.ray.worker import check_storage
from mlx_runtime.errors import StorageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import RunFolder

GROWS = Room([{"CPU": 0}], {"CPU": 0}, [NodeType("cpu", 3, {"CPU": 2}), NodeType("gpu", 1, {"CPU": 4, "GPU": 1})], 3)
STATIC = Room([{"CPU": 2}, {"CPU": 1}], {"CPU": 1})


@pytest.mark.pure
class TestCapacity:
    """Settings, the room of the cluster, and the finding of the preflight check."""

    @pytest.mark.parametrize(
        ("cfg", "room", "text"),
        [
            (
                TrainConfig(start_workers=8),
                GROWS,
                "the cluster has 0 CPUs and 0 GPUs, for 8 workers of 1 CPU; they wait until its autoscaler has started "
                "nodes: 3 nodes of cpu (2 CPUs each) and 1 node of gpu (4 CPUs, 1 GPU each), at most 3 nodes in total",
            ),
            (TrainConfig(start_workers=3), STATIC, "the cluster has 3 CPUs and 0 GPUs, for 3 workers of 1 CPU"),
            (
                TrainConfig(start_workers=8),
                Room([{"CPU": 2}], {"CPU": 2}, None),
                "the cluster has 2 CPUs and 0 GPUs, for 8 workers of 1 CPU; they wait until its autoscaler has started "
                "nodes: an unknown number of nodes; they train on CPUs unless cfg.use_gpu=true",
            ),
            (
                TrainConfig(start_workers=1),
                Room([{"CPU": 0}], {"CPU": 0}, [NodeType("gpu", 2, {"CPU": 4, "GPU": 1})], 2),
                "the cluster has 0 CPUs and 0 GPUs, for 1 worker of 1 CPU and 1 GPU; they wait until its autoscaler "
                "has started nodes: 2 nodes of gpu (4 CPUs, 1 GPU each)",
            ),
        ],
    )
    def test_it_waits_for_room_that_can_come(self, cfg: TrainConfig, room: Room, text: str) -> None:
        check = capacity_check(room, cfg)
        assert (check.ok, check.text) == (True, text)

    @pytest.mark.parametrize(
        ("cfg", "room", "text"),
        [
            (TrainConfig(start_workers=9), GROWS, "needs 9 CPUs; the cluster has room for 8; lower "),
            (TrainConfig(start_workers=2, use_gpu=True), GROWS, "needs 2 GPUs; the cluster has room for 1"),
            (TrainConfig(start_workers=2, cpus_per_worker=3), GROWS, "hold 1, with all that its autoscaler may start"),
            (TrainConfig(start_workers=1, cpus_per_worker=3), STATIC, "do not fit: the nodes of the cluster hold 0"),
        ],
    )
    def test_it_refuses_what_can_never_fit(self, cfg: TrainConfig, room: Room, text: str) -> None:
        check = capacity_check(room, cfg)
        assert not check.ok
        assert text in check.text


@pytest.mark.pure
def test_a_node_without_the_storage(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "digits" / "run_001")
    with pytest.raises(StorageError, match=r"^the node [0-9.]+ does not see .*digits/run_001, which the driver"):
        check_storage(folder)
    folder.path.mkdir(parents=True)
    folder.record.touch()
    check_storage(folder)


REPORT = {
    "pending_launches": {"cpu": 1},
    "pending_nodes": [["10.0.0.1", "cpu", "uninitialized"], ["10.0.0.2", "gpu", "setting-up"]],
    "node_availability_summary": {"node_availabilities": {"cpu": {"unavailable_node_information": None}}},
}
"""As Ray stores it; see `AutoscalerSummary`."""


@pytest.mark.pure
def test_the_autoscaler_reports_problems_first() -> None:
    assert list(activities(REPORT)) == ["starts 2 nodes of cpu and 1 node of gpu"]
    full = {"category": "VcpuLimitExceeded", "description": "you have requested more vCPU capacity than your limit"}
    summary = {"node_availabilities": {"gpu": {"unavailable_node_information": full}}}
    assert next(activities(REPORT | {"node_availability_summary": summary})) == (
        "cannot start gpu: VcpuLimitExceeded: you have requested more vCPU capacity than your limit"
    )
    assert list(activities({"pending_launches": None, "node_availability_summary": None})) == []


KILLED = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: 37) was 14.66GB used / 15GB limit (0.97)
Ray killed 1 worker(s) based on the killing policy
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
28410\t9.60\tray::RayWorker.train
22370\t4.42\t/opt/conda/bin/python prepare.py
3078\t0.42\t/usr/bin/python monitor
4425\t0.12\tsshd
Refer to the documentation on how to address the out of memory issue"""  # noqa: E501 - as Ray 2.60 writes it


@pytest.mark.pure
def test_a_lack_of_memory_names_the_node_and_its_largest_processes() -> None:
    error = failure_of(0, ray.exceptions.OutOfMemoryError(KILLED))
    assert str(error).startswith("1 worker(s) were killed due to the node running low on memory.")
    assert "(IP: 10.0.0.7, ID: 37) was 14.66GB used / 15GB limit" in str(error)
    largest = "9.60 GB ray::RayWorker.train, 4.42 GB /opt/conda/bin/python prepare.py, 0.42 GB /usr/bin/python monitor"
    assert str(error).endswith(f"; largest processes: {largest}")


@pytest.fixture(scope="module")
def growing(environment: dict[str, str]) -> Iterator[RayCluster]:
    with RayCluster(environment, grows_to=2) as made:
        yield made


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_runs_wait_for_nodes_and_for_each_other(
    growing: RayCluster, bound: Path, commands: Commands, environment: dict[str, str], tmp_path: Path
) -> None:
    """The first run wants three workers, and begins with two. The second one waits until the first is stopped."""
    settings = environment | {"RAY_ADDRESS": growing.url, "MLX_STORAGE": str(tmp_path)}

    def types(*words: str) -> str:
        done = commands.run(bound, list(words), settings, 560)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def record(name: str) -> dict[str, Any]:
        file = tmp_path / name / "run_001" / "run.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    def until(what: Callable[[], Any]) -> Any:
        end = time.monotonic() + 400
        while not (found := what()):
            assert time.monotonic() < end
            time.sleep(0.1)
        return found

    long = ("cfg.num_epochs=100000", "tools.early_stopping.patience=1000000", "cfg.keep_checkpoints=1")
    elastic = ("cfg.start_workers=3", "cfg.elastic.min_workers=2", "cfg.elastic.wait_s=3")
    types("train", "launch", "cfg.name=first", *elastic, *long)
    reasons: list[str] = []

    def first_runs() -> bool:
        found = record("first")
        if found.get("waits_for") not in (None, *reasons[-1:]):
            reasons.append(found["waits_for"])
        return found.get("latest") is not None

    until(first_runs)
    assert re.match("2 CPUs, [01] free; the autoscaler (was asked for|starts) ", reasons[0])  # a node may be there
    assert record("first")["workers"] == 2
    assert "in Ray cluster with 0 CPUs, which grows to 2" in types("xp", "logs", "first", "--no-follow")

    types("train", "launch", "cfg.name=second", *long)
    waiting = "s for 2 CPUs, 0 free; first/run_001 holds 2 CPUs; the autoscaler"
    until(lambda: waiting in types("xp", "ls", "second"))
    assert types("xp", "stop", "first", "latest") == "first run_001 is STOPPED\n"
    until(lambda: record("second").get("latest"))
    types("xp", "stop", "second", "latest")
    growing.wait(0)  # the request is withdrawn
