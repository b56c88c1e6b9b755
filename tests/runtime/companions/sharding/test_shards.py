"""Checkpoints with shards: saved by some workers, restored by others; damage; loads that run no code."""

import json
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
from forkserver import Commands
from safetensors.torch import load_file

from mlx_runtime.companions.sharding.consolidation import consolidate
from mlx_runtime.companions.sharding.shards import ShardedTensors
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.checkpoints.index import INDEX, list_checkpoints
from mlx_runtime.runs.checkpoints.store import CheckpointStore, read
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import storage_at

pytestmark = pytest.mark.local

SCRIPT = str(Path(__file__).with_name("sharding.py"))

Stages = tuple[Path, dict[str, list[Any]]]

RESTORED = ("same", "three", "hybrid", "hybrid to two", "one", "from whole")
"""Stages of `sharding.py` that restore what the stage `saved` has saved."""


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


def test_tensors_have_the_layout_of_the_run(stages: Stages) -> None:
    """Weights that a tool keeps, and momenta of an optimizer that had none."""
    found = {name: {*stages[1][name][0]["layouts"]} for name in RESTORED}
    sharded, hybrid = "(Shard(dim=0),)", "(Replicate(), Shard(dim=0))"
    assert found == {name: {sharded} for name in RESTORED} | {"hybrid": {hybrid}, "one": {"whole"}}
    momentum = stages[1]["three"][2]["momentum"]
    assert momentum["layouts"] == [sharded] * 2
    assert difference(momentum["restored"], stages[1]["saved"][0]["momentum"]["saved"]) == 0


@pytest.mark.parametrize("stage", ["same", "one"])
def test_another_shape_is_told_by_name(stages: Stages, stage: str) -> None:
    for rank in stages[1][stage]:
        assert rank["misfit"].startswith("models.net in the checkpoint does not fit the config: ")
        assert "size mismatch for embed.weight" in rank["misfit"]
        assert "torch.Size([7, 6])" in rank["misfit"]
        assert "torch.Size([7, 4])" in rank["misfit"]


def test_tensors_that_only_some_workers_hold_are_refused(stages: Stages) -> None:
    for rank in stages[1]["hybrid to two"]:
        assert rank["uneven"].startswith(
            "tools.best.weights.embed.weight is sharded, but not all workers hold a part of it."
        )
    assert list((stages[0] / "uneven").iterdir()) == []


def test_replicas_are_written_once_and_tied_weights_too(stages: Stages) -> None:
    """By two replicas of two workers each as often as by two workers."""
    two, four = (list_checkpoints(str(stages[0] / name))[0] for name in ("two", "four"))
    indices = [json.loads((stages[0] / name / "epoch_0001" / INDEX).read_bytes()) for name in ("two", "four")]
    contents = [
        sum(4 * torch.Size(piece["sizes"]).numel() for item in index["tensors"].values() for piece in item["pieces"])
        for index in indices
    ]
    assert contents[0] == contents[1]
    assert [len(list((stages[0] / name).rglob("*.safetensors"))) for name in ("two", "four")] == [2, 4]
    assert "models/net/embed.weight" in indices[0]["tensors"]
    assert "models/net/head.weight" not in indices[0]["tensors"]
    files = [sum(path.stat().st_size for path in (stages[0] / name).rglob("*.safetensors")) for name in ("two", "four")]
    assert files == [two.shards_bytes, four.shards_bytes]


def test_whole_tensors_are_read_without_workers(stages: Stages, checkpoint: Path) -> None:
    """Also of a folder with nothing but the files, and tied weights stay one tensor."""
    (checkpoint / "checkpoint.json").unlink()
    state, saved = read(str(checkpoint)), stages[1]["saved"][0]["saved"]
    assert all(difference(state[name], saved[name]) == 0 for name in saved)
    net = state["models"]["net"]
    assert net["head.weight"] is net["embed.weight"]


def a_run(stages: Stages, stage: str, folder: Path) -> RunFolder:
    """A run whose only checkpoint is that of a stage."""
    shutil.copytree(stages[0] / stage, folder / "net" / "run_001" / "checkpoints")
    return RunFolder(folder / "net" / "run_001")


@pytest.mark.parametrize("stage", ["two", "four", "whole"])
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
    with pytest.raises(UsageError, match=r"cannot write /proc/net.safetensors: No such file or directory"):
        consolidate(run, output=Path("/proc/net.safetensors"))
    file.write_text("x")
    consolidate(run, output=file, force=True)
    assert difference(load_file(file), saved) == 0


def test_a_damaged_checkpoint_leaves_no_file(stages: Stages, tmp_path: Path) -> None:
    run = a_run(stages, "two", tmp_path)
    shard = Path(run.checkpoints, "epoch_0001", "shard_00001.safetensors")
    flip(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little"))  # the first weight
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="SHA-256"):
        consolidate(run, output=tmp_path / "out" / "net.safetensors")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UsageError, match="has no checkpoint epoch_0002"):
        consolidate(run, "epoch_0002")


def test_shards_are_files_that_others_read(checkpoint: Path) -> None:
    shards = [load_file(checkpoint / f"shard_0000{rank}.safetensors") for rank in range(2)]
    weight = torch.cat([shards[0]["models/net/last.weight@0,0"], shards[1]["models/net/last.weight@1,0"]])
    assert difference(weight, read(str(checkpoint))["models"]["net"]["last.weight"]) == 0


def flip(file: Path, position: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a byte of a shard": (lambda folder: flip(folder / "shard_00001.safetensors"), "SHA-256"),
    "half of a shard": (lambda folder: os.truncate(folder / "shard_00000.safetensors", 2000), "has 2,000 of"),
    "a lost shard": (lambda folder: (folder / "shard_00001.safetensors").unlink(), "there is no such file"),
    "a byte of the index": (lambda folder: flip(folder / INDEX), "SHA-256"),
    "a lost index": (lambda folder: (folder / INDEX).unlink(), "there is no such file"),
    "a foreign shard": (
        lambda folder: shutil.copy(folder / "shard_00000.safetensors", folder / "shard_00001.safetensors"),
        "is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed(checkpoint: Path, name: str) -> None:
    damage, problem = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(ConfigError, match=f"is damaged: .*{problem}|{problem}"):
        read(str(checkpoint))


def test_a_checkpoint_whose_shards_are_lost_is_not_the_newest(checkpoint: Path) -> None:
    """Nothing is read for that; what only a worker that reads notices is rejected by name."""
    newer = Path(shutil.copytree(checkpoint, checkpoint.parent / "epoch_0002"))
    about = json.loads((newer / "checkpoint.json").read_text()) | {"epoch": 1}
    (newer / "checkpoint.json").write_text(json.dumps(about))
    saved, warnings = CheckpointStore(str(checkpoint.parent)), []
    found = saved.newest(warnings.append)
    assert found is not None
    assert (found[0].name, warnings) == ("epoch_0002", [])
    (newer / "shard_00001.safetensors").unlink()
    found = saved.newest(warnings.append)
    assert found is not None
    assert found[0].name == "epoch_0001"
    saved.reject(found[0], "it is damaged")
    with pytest.raises(ConfigError, match=r"No other checkpoint is left"):
        saved.newest(warnings.append)


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


def test_pieces_are_verified_one_by_one(checkpoint: Path) -> None:
    """A worker that needs none of the rows of a damaged piece does not notice, and needs not read it."""
    index = (checkpoint / INDEX).read_bytes()
    shards = ShardedTensors(storage_at(str(checkpoint.parent)), checkpoint.name, index)
    pieces = [
        (piece["start"], name, piece)
        for name, item in shards.tensors.items()
        for piece in item["pieces"]
        if piece["file"] == "shard_00001.safetensors"
    ]
    _, damaged, piece = max(pieces, key=lambda item: item[0])
    assert len(shards.tensors[damaged]["pieces"]) > 2
    wanted = {name: torch.empty(item["shape"]) for name, item in shards.tensors.items()}
    shards.read(wanted.items())
    flip(checkpoint / piece["file"])
    others = {name: torch.empty_like(item) for name, item in wanted.items() if name != damaged}
    shards.read(others.items())
    assert all(torch.equal(item, wanted[name]) for name, item in others.items())
    rows = torch.empty(piece["offsets"][0], *wanted[damaged].shape[1:])
    shards.read([(damaged, rows)])
    assert torch.equal(rows, wanted[damaged][: len(rows)])
    with pytest.raises(ConfigError, match="SHA-256"):
        shards.read([(damaged, wanted[damaged])])


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


def test_a_full_disk_is_named(commands: Commands, tmp_path: Path) -> None:
    """A file size limit of 64 KiB simulates one; the part that is not sharded, which torch writes, does not fit."""
    done = commands.run(tmp_path, [str(tmp_path)], commands.environment, 60, FULL)
    assert done.stdout == f"cannot write a checkpoint to {tmp_path}: [Errno 27] File too large\n", done.stderr
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.companions.sharding.saving import Parts
from mlx_runtime.runs.checkpoints.store import BackgroundSaver, CheckpointStore
from mlx_runtime.runs.checkpoints.store import PARTS
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parts = Parts()
sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
state = dict.fromkeys(PARTS) | {"models": parts.without(sharded, "models"), "tools": torch.ones(100_000)}
saver = BackgroundSaver(CheckpointStore(sys.argv[1]), lambda checkpoint: None, lambda: None)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
try:
    saver.save(state, CheckpointInfo(0, True, 1, {}), parts)
    saver.wait()
except StorageError as error:
    print(error)
"""
