"""A cluster that grows: Ray's autoscaler starts nodes on this machine, from a head without CPUs to two, and back."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import RayCluster
from faults import wait_for
from forkserver import Commands

from mlx_runtime.companions.ray.worker import check_storage
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import RunFolder


@pytest.mark.pure
def test_a_node_without_the_storage(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "digits" / "run_001")
    with pytest.raises(StorageError, match=r"^the node [0-9.]+ does not see .*digits/run_001, which the driver"):
        check_storage(folder)
    folder.path.mkdir(parents=True)
    folder.record.touch()
    check_storage(folder)


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

    long = ("cfg.num_epochs=100000", "tools.early_stopping.patience=1000000", "cfg.keep_checkpoints=1")
    elastic = ("cfg.start_workers=3", "cfg.elastic.min_workers=2", "cfg.elastic.wait_s=3")
    types("train", "launch", "cfg.name=first", *elastic, *long)
    reasons: list[str] = []

    def first_runs() -> bool:
        found = record("first")
        if found.get("waits_for") not in (None, *reasons[-1:]):
            reasons.append(found["waits_for"])
        return found.get("latest") is not None

    wait_for(first_runs)
    assert re.match("2 CPUs, [01] free; the autoscaler was asked for them", reasons[0])  # a node may be there
    assert record("first")["workers"] == 2
    assert "in Ray cluster with 0 CPUs, which grows\n" in types("xp", "logs", "first", "--no-follow")

    types("train", "launch", "cfg.name=second", *long)
    waiting = "s for 2 CPUs, 0 free; the autoscaler"
    wait_for(lambda: waiting in types("xp", "ls", "second"))
    assert types("xp", "stop", "first", "latest") == "first run_001 is STOPPED\n"
    wait_for(lambda: record("second").get("latest"))
    types("xp", "stop", "second", "latest")
    growing.wait(0)  # the request is withdrawn
