"""Data jobs and `mlx data show` on a real cluster: a head and two raylets on loopback, with a token."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import RayCluster, cluster
from conftest import Mlx

from mlx_runtime import data
from mlx_runtime.storage import Storage

TOKEN = "token-of-the-data-cluster-0123456789abcdef"

pytestmark = pytest.mark.timeout(900)

Types = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def ray_cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    with cluster(environment, TOKEN) as made:
        yield made


@pytest.fixture
def shards(baked_job: Path, tmp_path: Path, mlx: Mlx) -> Path:
    folder = Path(shutil.copytree(baked_job, tmp_path / "shards"))
    assert mlx(folder, "data", "bind").returncode == 0
    return folder


@pytest.fixture
def types(shards: Path, mlx: Mlx, ray_cluster: RayCluster) -> Types:
    """`types("data", "launch", ...)` in the data job, knowing the cluster and its token."""
    settings = {"RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ray_cluster.url}

    def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        return mlx(shards, *arguments, **settings | more)

    return run


def test_a_job_fills_the_shared_storage(shards: Path, types: Types) -> None:
    """Launched and followed to its end; launched again, it is told that all is there before anything is sent."""
    done = types("data", "launch", "--follow", "images.per_shard=300", "cfg.start_workers=3")
    assert done.returncode == 0, done.stdout + done.stderr
    made = shards / "storage" / "data" / "shards"
    lines = done.stdout.splitlines()
    assert lines[0].startswith("checking  http://127.0.0.1:")
    assert lines[1:3] == ["job       data-shards", f"folder    {made}"]
    assert "workers   3 tasks at a time in Ray cluster with 4 CPUs" in lines
    assert lines[-1] == f"folder    {made}"
    assert len(list(made.glob("*_images.npy"))) == 6
    done = types("data", "launch", "--check")
    assert done.returncode == 1
    assert f"FAIL  config     {made} is there already, made 20" in done.stdout


def test_an_error_of_the_users_ends_it_with_its_code(shards: Path, types: Types) -> None:
    done = types("data", "launch", "-f", "images.size=-1")
    assert done.returncode == 1, done.stdout + done.stderr
    error = done.stdout.partition("\nerror: ")[2]
    assert re.match(r"RuntimeError: .* \(in item \d+\)\n  src/job.py:\d+ in write_shard\n", error)
    assert "mlx_runtime" not in error
    assert Storage(str(shards / "storage" / "data")).names() == []


def test_a_job_that_is_stopped_leaves_nothing(
    shards: Path, types: Types, ray_cluster: RayCluster, environment: dict[str, str]
) -> None:
    job = shards / "src" / "job.py"
    job.write_text(job.read_text().replace("digits = load_digits()\n", "__import__('time').sleep(60)\n", 1))
    done = types("data", "launch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "status    RUNNING"
    command = next(line for line in done.stdout.splitlines() if line.startswith("stop ")).split()
    assert command[1] == f"RAY_ADDRESS={ray_cluster.url}"
    settings = environment | {"RAY_ADDRESS": ray_cluster.url, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray, *command[3:]], env=settings, check=True, timeout=120, capture_output=True)
    until = time.monotonic() + 60
    while Storage(str(shards / "storage" / "data")).names() and time.monotonic() < until:
        time.sleep(0.5)
    assert Storage(str(shards / "storage" / "data")).names() == []


def test_a_storage_that_only_the_cluster_has_is_shown_by_it(
    shards: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder is hidden from the command for the moment in which it looks whether it is there."""
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "shared" / "data" / "a.bin").write_bytes(b"x" * 1500)
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path / "shared"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    here = Path.is_dir
    monkeypatch.setattr(data.Path, "is_dir", lambda path: str(path) != str(tmp_path / "shared") and here(path))
    found = data.show("data", 1, 20, ray_cluster.url)
    assert found.lines() == ["data       1.5 kB  1 file", "└── a.bin  1.5 kB"]
    with pytest.raises(data.UsageError, match=r"on the cluster there is no .*/shared/dato\. Did you mean 'data'\?"):
        data.show("dato", 1, 20, ray_cluster.url)
