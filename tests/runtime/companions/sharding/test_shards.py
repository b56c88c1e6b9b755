"""Checkpoints with shards: saved by some workers, restored by others; damage; loads that run no code."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx
from safetensors.torch import load_file

from mlx_runtime.companions.sharding.consolidation import consolidate
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.checkpoints.index import INDEX
from mlx_runtime.runs.checkpoints.store import CheckpointStore, read
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import storage_at

pytestmark = pytest.mark.local

SCRIPT = str(Path(__file__).with_name("sharding.py"))

Stages = tuple[Path, dict[str, list[Any]]]

RESTORED = ("same", "hybrid", "three", "one", "from whole")
"""Stages of `sharding.py` that restore what the stage `saved` has saved, or what one of them has saved again."""


@pytest.fixture(scope="module")
def stages(python: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The folder of the checkpoints, and what each stage of `sharding.py` found on each rank."""
    folder = tmp_path_factory.mktemp("shards")
    done = python(folder, SCRIPT, "main", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, torch.load(folder / "results.pt", weights_only=True)


@pytest.fixture
def checkpoint(stages: Stages, tmp_path: Path) -> Path:
    """A copy of the checkpoint of two workers."""
    return Path(shutil.copytree(stages[0] / "two" / "epoch_0001", tmp_path / "epoch_0001"))


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between tensors; infinity if anything else differs."""
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return torch.inf
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        same = one.keys() == other.keys()
        return max((difference(one[name], other[name]) for name in one), default=0.0) if same else torch.inf
    if isinstance(one, list | tuple):
        return difference(dict(enumerate(one)), dict(enumerate(other)))
    return 0.0 if one == other else torch.inf


@pytest.mark.parametrize("stage", RESTORED)
def test_everything_is_restored_whatever_the_workers(stages: Stages, stage: str) -> None:
    """Weights, momenta, step counts, buffers and the weights that a tool keeps."""
    saved = stages[1]["saved"][0]["saved"]
    assert len(saved["optimizers"]["main"]["state"]) == 9
    for rank in stages[1][stage]:
        assert difference(rank["restored"], saved) == 0


@pytest.mark.parametrize(("stage", "tolerance"), [("same", 0), *((name, 1e-6) for name in RESTORED[1:])])
def test_training_continues(stages: Stages, stage: str, tolerance: float) -> None:
    """On as many workers, bit for bit. The stage loads the weights that the tool kept, which are the same."""
    wanted = stages[1]["saved"][0]["continued"]
    for rank in stages[1][stage]:
        assert difference(rank["continued"], wanted) <= tolerance


def test_tensors_that_only_some_workers_hold_are_refused(stages: Stages) -> None:
    for rank in stages[1]["from whole"]:
        assert rank["uneven"].startswith(
            "tools.best.weights.embed.weight is sharded, but not all workers hold a part of it."
        )
    assert list((stages[0] / "uneven").iterdir()) == []


def a_run(stages: Stages, stage: str, folder: Path) -> RunFolder:
    """A run whose only checkpoint is that of a stage."""
    shutil.copytree(stages[0] / stage, folder / "net" / "run_001" / "checkpoints")
    return RunFolder(folder / "net" / "run_001")


@pytest.mark.parametrize("stage", ["two", "whole"])
def test_weights_become_one_file_that_others_read(stages: Stages, stage: str, tmp_path: Path) -> None:
    """Those of a run without shards as well. Tied weights are there under both names."""
    file, run = tmp_path / "net.safetensors", a_run(stages, stage, tmp_path)
    line = consolidate(run, "epoch_0001", file)
    assert line.startswith(f"wrote {file}: 13 tensors, ")
    assert line.endswith("of net/run_001 epoch_0001")
    saved = {f"net.{name}": item for name, item in stages[1]["saved"][0]["saved"]["models"]["net"].items()}
    assert difference(load_file(file), saved) == 0
    with pytest.raises(UsageError, match=r"net.safetensors exists; replace it with --force"):
        consolidate(run, output=file)
    file.write_text("x")
    consolidate(run, output=file, force=True)
    assert difference(load_file(file), saved) == 0


def flip(file: Path, position: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a byte of a shard": (lambda folder: flip(folder / "shard_00001.safetensors"), "SHA-256"),
    "a lost shard": (lambda folder: (folder / "shard_00001.safetensors").unlink(), "there is no such file"),
    "a byte of the index": (lambda folder: flip(folder / INDEX), "SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed(checkpoint: Path, name: str) -> None:
    damage, problem = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(ConfigError, match=f"is damaged: .*{problem}|{problem}"):
        read(str(checkpoint))


def test_reading_shards_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    for file in ("shard_00000.safetensors", "shard_00001.safetensors", INDEX):
        whole = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(pickle.dumps(Evil()).ljust(len(whole), b" "))
        with pytest.raises(ConfigError, match="is damaged"):
            read(str(checkpoint))
        (checkpoint / file).write_bytes(whole)
    assert not (tmp_path / "ran").exists()
    assert read(str(checkpoint))["epoch"] == 0


@pytest.mark.s3
def test_shards_on_an_object_store(s3: str, tmp_path: Path) -> None:
    """Replaced once; the files of the first attempt are gone."""
    uri = s3.format(f"checkpoints/{tmp_path.name}")
    command = [sys.executable, SCRIPT, "at_uri", str(tmp_path)]
    subprocess.run(command, input=uri, text=True, check=True, timeout=120)
    for rank in range(2):
        found = torch.load(tmp_path / "uri" / f"{rank}.pt", weights_only=True)
        assert difference(found["restored"], found["saved"]) == 0
    saved = CheckpointStore(uri)
    assert difference(saved.load(saved.all()[0])["models"], found["saved"]["models"]) == 0
    files = [re.sub(r"-[0-9a-f]{8}", "", name) for name in storage_at(uri).names("epoch_0001")]
    assert files == ["checkpoint.json", INDEX, "shard_00000.safetensors", "shard_00001.safetensors", "state.pt"]


@pytest.mark.kills
def test_a_worker_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Either of two workers is killed at different moments; the other one notices, and readers find whole ones.

    KILLS=20 in `make chaos`.
    """
    saved, streams = (
        CheckpointStore(str(tmp_path / "checkpoints")),
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    command = [sys.executable, SCRIPT, "kills", str(tmp_path)]
    with subprocess.Popen(command, **streams, stderr=subprocess.DEVNULL, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(kills := int(os.environ.get("KILLS", "4"))):
            process.stdin.write("another\n")
            pids = [*map(int, process.stdout.readline().split())]
            for _ in range(4):
                process.stdout.readline()
            time.sleep(number / kills / 30)
            os.kill(pids[number % 2], signal.SIGKILL)
            line = next(line for line in process.stdout if line.startswith("ended"))
            assert sorted(map(int, line.split()[1:])) == [-signal.SIGKILL, 1]
            found = saved.newest(pytest.fail)
            assert found is not None
            assert found[1]["epoch"] == found[0].epoch
    saved.clean()
    assert all(path.name.startswith("epoch_") for path in (tmp_path / "checkpoints").iterdir())
