"""Jobs on a real cluster: drivers that come back, and data jobs."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cluster_users import TOKEN, Types, User, until
from clusters import RayCluster
from conftest import Mlx, edit
from faults import differences, final_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_killed_driver_resumes_as_if_nothing_had_happened(trained: Path, user: User, ray_cluster: RayCluster) -> None:
    words = ("--name=killed", "--retries=1", "cfg.num_epochs=3", "cfg.start_workers=1", "cfg.checkpoint_every_steps=5")
    done = user.types("train", "launch", "--ray-address", ray_cluster.url, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: user.record(name="killed").get("latest"))
    os.kill(user.record(name="killed")["pid"], signal.SIGKILL)
    log = user.types("xp", "logs", "killed", "run_001")  # follows both drivers
    assert log.returncode == 0, log.stdout + log.stderr
    assert "retry     the driver was killed by SIGKILL (out of memory?); retry 1 of 1 begins at " in log.stdout
    record, runs = user.record(name="killed"), user.folder / "runs"
    assert (record["status"], record["attempt"], record["epoch"]) == ("SUCCEEDED", 2, 2)
    (first,) = json.loads(user.types("xp", "ls", "killed", "--json").stdout)[0]["attempts"]
    assert (first["status"], first["error"]) == ("FAILED", "the driver was killed by SIGKILL (out of memory?)")
    assert first["job"] == record["job"]
    assert differences(final_state(trained), final_state(runs / "killed/run_001")) == []


class TestDataJobs:
    """Data jobs on a cluster."""

    @pytest.fixture
    def shards(self, baked_job: Path, tmp_path: Path, mlx: Mlx) -> Path:
        folder = Path(shutil.copytree(baked_job, tmp_path / "shards"))
        assert mlx(folder, "data", "bind").returncode == 0
        return folder

    @pytest.fixture
    def types(self, shards: Path, mlx: Mlx, ray_cluster: RayCluster) -> Types:
        """`types("data", "launch", ...)` runs a command in the data job, with the cluster and its token."""
        settings = {"RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ray_cluster.url}

        def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
            return mlx(shards, *arguments, **settings | more)

        return run

    def test_one_that_is_stopped_resumes_with_its_finished_items(
        self, shards: Path, types: Types, ray_cluster: RayCluster
    ) -> None:
        """All items but the first wait for a file, in two tasks at a time."""
        job, load = shards / "src" / "job.py", "        digits = load_digits()\n"
        edit(job, load, f"        while first and not Path({str(shards / 'go')!r}).exists(): time.sleep(0.1)\n{load}")
        edit(job, "import io\n", "import io\nimport time\nfrom pathlib import Path\n")
        done = types("data", "launch", "images.per_shard=600")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "follow    mlx data logs shards run_001" in done.stdout.splitlines()
        assert "stop      mlx data stop shards run_001" in done.stdout.splitlines()
        items = shards / "storage/.jobs/shards/run_001/logs/items.jsonl"
        until(lambda: items.exists() and items.read_text().endswith("\n"))
        done = types("data", "stop", "shards")
        assert (done.returncode, done.stdout) == (0, "shards run_001 is STOPPED\n"), done.stderr
        job = json.loads(types("data", "ls", "--json").stdout)[0]["job"]["id"]  # other jobs have had this name
        until(lambda: ray_cluster.get(f"/api/jobs/{job}")["status"] == "STOPPED")
        log = types("data", "logs", "shards", "--follow")
        assert log.returncode == 143
        assert "kept      1 finished item; to continue: mlx data launch --resume images.per_shard=600" in log.stdout
        (shards / "go").touch()
        done = types("data", "launch", "--resume", "-f", "images.per_shard=600")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed   1 finished item" in done.stdout.splitlines()
        made = shards / "storage" / "data" / "shards"
        assert json.loads((made / "index.json").read_text())["rows"] == [600, 600, 597]
        assert sorted(file.name for file in made.iterdir())[2:] == [
            f"shard_{number:04d}_{part}.npy" for number in range(3) for part in ("images", "labels")
        ]
        (row,) = json.loads(types("data", "ls", "--json").stdout)
        assert (row["status"], [item["status"] for item in row["attempts"]]) == ("SUCCEEDED", ["STOPPED"])
