"""All workers of a run write its prepared datasets: with real processes, killed and stopped at many moments."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from clusters import free_ports
from conftest import Mlx, Start, edit
from faults import wait_for

from mlx_runtime.companions.prepared.columns import load_columns
from mlx_runtime.companions.prepared.store import Store
from mlx_runtime.storage.leases import start_time_of

pytestmark = pytest.mark.local

PREPARE = ("--prepare-batches", "cfg.num_epochs=1", "cfg.only=train")

READ = """
        import os
        rank = os.environ.get("RANK", "driver")
        with open("READ", "a") as file:
            file.write(f"{rank} {index} {os.getpid()}\\n")
        time.sleep(self.slow_s * (rank != "driver"))
"""
"""What a dataset does for each row."""


@pytest.fixture(scope="module")
def made(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory, mlx: Mlx) -> Path:
    """An experiment whose dataset notes who reads its rows."""
    folder = make_in("kinds", tmp_path_factory.mktemp("workers"))
    source = folder / "src" / "experiment.py"
    edit(source, "        time.sleep(self.slow_s)\n", READ)
    for name in ("numbers: Numbers = Numbers()", "table: Table = Table()", "test: Rows = Rows(rows=31)"):
        edit(source, f"    {name}\n", "")
    edit(source, "    val: Table = Table(rows=130, batch_size=16)\n", "")
    (folder / "src" / "conf.yaml").unlink()
    assert mlx(folder, "train", "bind").returncode == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(made, tmp_path / "kinds"))
    edit(folder / "src" / "experiment.py", '"READ"', repr(str(folder / "read.txt")))
    return folder


def reads(folder: Path) -> list[tuple[str, int, int]]:
    """Return rank, row and process of each row that was read."""
    lines = [line.split(" ") for line in (folder / "read.txt").read_text().splitlines()]
    return [(rank, int(row), int(pid)) for rank, row, pid in lines]


def prepared_files(folder: Path) -> list[str]:
    """Return all files in the store, without the names of datasets and attempts."""
    files = (folder / "runs" / ".prepared").rglob("*")
    return sorted(file.name.rpartition("-")[2] for file in files if file.is_file())


def check(folder: Path, rows: int = 53, columns: Sequence[str] = ("0.npy",)) -> None:
    """Check that the one prepared dataset is whole and in order, and that nothing else was left."""
    store = Store(str(folder / "runs" / ".prepared"))
    (name,) = store.names()
    manifest = store.find(name)
    assert manifest is not None
    assert load_columns(store, manifest, folder, max_bytes=0)["row"].tolist() == [*range(rows)]
    assert prepared_files(folder) == [*columns, "last_used", "manifest.json"]


def preparing(folder: Path) -> bool:
    """Return True once both workers have read rows to write."""
    ranks = [rank for rank, *_ in reads(folder)] if (folder / "read.txt").exists() else []
    return min(ranks.count("0"), ranks.count("1")) > 9


def test_every_worker_reads_its_share(folder: Path, mlx: Mlx) -> None:
    """Preparing takes longer than steps may: it is no deadlock."""
    slow = (
        "datasets.train.slow_s=0.01",
        "datasets.train.rows=1003",
        "cfg.elastic.hang_timeout_s=1",
        "cfg.start_workers=3",
        "cfg.debug.limit_batches=2",
    )
    done = mlx(folder, "train", "run", *PREPARE, *slow)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    sample = {row for rank, row, *_ in reads(folder) if rank == "driver"}
    shares = [{row for rank, row, *_ in reads(folder) if rank == which} - sample for which in "012"]
    assert all(300 < len(share) < 350 for share in shares)
    assert len(set().union(*shares)) == sum(map(len, shares)) == 1003 - len(sample)
    check(folder, 1003)
    assert [line for line in done.stdout.splitlines() if line.startswith("prepare train | ")]
    assert "datasets.train is prepared: 1,003 rows" in done.stdout
    record = json.loads((folder / "runs" / "kinds" / "run_001" / "run.json").read_text())
    assert list(record["prepared"]) == ["train"]
    (folder / "read.txt").unlink()
    done = mlx(folder, "train", "run", *PREPARE, *slow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepared  train: read from" in done.stdout
    assert {rank for rank, *_ in reads(folder)} == {"driver"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("return torch.tensor(float(index + int(rank == '1')))", r"rank 1 on \S+ reads other rows than the driver"),
        ("return torch.tensor(float(index) + (rank == '1' and index == 9) / 0)", "ZeroDivisionError"),
    ],
)
def test_workers_that_read_other_rows_are_refused(folder: Path, mlx: Mlx, change: str, message: str) -> None:
    edit(folder / "src" / "experiment.py", "return torch.tensor(float(index))", change)
    done = mlx(folder, "train", "run", *PREPARE)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: datasets.train cannot be ")
    assert re.search(message, errors[0]), errors
    assert "Traceback" not in done.stdout + done.stderr
    assert prepared_files(folder) == []


@pytest.mark.kills
@pytest.mark.parametrize(("stop", "code"), [("SIGINT", 130), ("mlx xp stop", 143)])
def test_a_stop_ends_preparing_at_once(folder: Path, mlx: Mlx, start: Start, stop: str, code: int) -> None:
    process = start(folder, "train", "run", *PREPARE, "datasets.train.slow_s=0.3", "datasets.train.rows=100000")
    wait_for(lambda: preparing(folder))
    if stop == "SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        assert mlx(folder, "xp", "stop", "kinds", "run_001").returncode == 0
    out, error = process.communicate(60)
    assert process.returncode == code, out + error
    assert "Traceback" not in out + error
    assert "stopping " not in out, "it waited for a step and a checkpoint"
    assert prepared_files(folder) == []
    assert json.loads((folder / "runs" / "kinds" / "run_001" / "run.json").read_text())["status"] == "STOPPED"


@pytest.mark.kills
def test_a_killed_worker_is_replaced_and_a_killed_driver_leaves_nothing(folder: Path, mlx: Mlx, start: Start) -> None:
    slow = ("datasets.train.slow_s=0.2", "cfg.elastic.max_failures=1")
    process = start(folder, "train", "run", *PREPARE, *slow)
    store = folder / "runs" / ".prepared"
    wait_for(lambda: list(store.rglob("*.npy")))
    process.kill()
    process.wait()
    wait_for(lambda: all(start_time_of(pid) is None for _, _, pid in reads(folder)))
    assert {"sample", "npy"} <= {name.rpartition(".")[2] for name in prepared_files(folder)}  # not removed by anybody
    for file in store.rglob("*"):
        os.utime(file, (0, 0))  # later, they do not count as in use
    (folder / "read.txt").unlink()
    process = start(folder, "train", "run", *PREPARE, *slow)
    wait_for(lambda: preparing(folder))
    os.kill(next(worker_of(pid) for rank, _, pid in reads(folder) if rank == "1"), signal.SIGKILL)
    out, error = process.communicate(120)
    assert process.returncode == 0, out + error
    assert "lost      rank 1: " in out
    check(folder)


def worker_of(pid: int) -> int:
    """Return the worker that has started a reading process, or is that process."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    rank = [item for item in Path(f"/proc/{parent}/environ").read_text().split("\0") if item.startswith("RANK=")]
    return parent if rank == ["RANK=1"] else pid


@pytest.mark.examples
def test_processes_of_torchrun_read(folder: Path, environment: dict[str, str]) -> None:
    """The sample is larger than a message that torchrun passes on."""
    port = free_ports(1)[0]
    source = folder / "src" / "experiment.py"
    wide = '"wide": torch.zeros(len(batch["item"]), 1 << 18)'
    source.write_text(
        source.read_text().replace('torch.stack(batch["item"])}', f'torch.stack(batch["item"]), {wide}}}')
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += ["--master-addr=127.0.0.1", "main.py", *PREPARE, "cfg.start_workers=2"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [rank for rank, *_ in reads(folder)]
    assert min(ranks.count("0"), ranks.count("1")) > 20
    check(folder, columns=("0.npy", "1.npy"))
