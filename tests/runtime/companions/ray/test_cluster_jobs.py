"""Jobs on a real cluster: a plan for its nodes, drivers that come back, and data jobs."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_users import TOKEN, Types, User, until
from clusters import RayCluster
from conftest import Mlx, edit
from faults import differences, final_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_plan_for_the_nodes_of_the_cluster(
    user: User, ray_cluster: RayCluster, make_in: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """Each stage trains on the node that the plan names, in another order than Ray's. If one is lost, the run waits for
    a node with the same name."""
    at = User(make_in("faults", tmp_path / "runs"), user.environment, user.commands)
    stages = [{"node": f"node_{(number + 2) % 3}", "first": number, "last": number} for number in range(3)]
    plan = {"model": "net", "blocks": ["layers.0", "layers.1", "layers.3"], "clusters": [{"stages": stages}]}
    (at.folder / "src" / "fragments.json").write_text(json.dumps(plan))
    line = "        self.models.net = prepare_model(self.models.net)\n"
    code = """\
        held = [name.split(".")[1] for name, item in self.models.net.named_parameters() if not item.is_meta]
        print("on", ray.get_runtime_context().get_node_labels()["node"], "are", *dict.fromkeys(held))
"""
    edit(at.folder / "src" / "experiment.py", line, code + line)
    words = ("cfg.strategy=pipeline", "cfg.fragments.plan=src/fragments.json", "cfg.start_workers=3")
    words += ("cfg.num_epochs=2", "cfg.checkpoint_every_steps=5", "cfg.pause_s=10", "cfg.pause_from=6")
    ray_cluster.add(cpus=2, labels={"node": "node_2"})
    try:
        ray_cluster.wait(3)
        options = ("--name=patient", *words, f"cfg.out={tmp_path / 'patient'}")
        done = at.types("train", "launch", "--ray-address", ray_cluster.url, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: at.record(name="patient").get("latest"))
        logs = [(at.folder / f"runs/patient/run_001/logs/rank_{rank}.log").read_text() for rank in range(3)]
        found = {tuple(re.findall(r"^on (\w+) are (\d)", log, re.MULTILINE)) for log in logs}
        assert found == {(("node_2", "0"),), (("node_0", "1"),), (("node_1", "3"),)}
        ray_cluster.remove()
        until(lambda: str(at.record(name="patient").get("waits_for")).startswith("node_2 of the plan"))
        (tmp_path / "patient" / "hurry").touch()
        assert re.search(r"patient +run_001 +WAITING .* for node_2 of the plan", at.types("xp", "ls").stdout)
        ray_cluster.add(cpus=2, labels={"node": "node_2"})
        ray_cluster.wait(3)
        until(lambda: at.record(name="patient")["status"] == "SUCCEEDED")
        log = at.folder / "runs/patient/run_001/logs/driver.log"
        assert "workers   3: restarted\nrestored  " in log.read_text()
    finally:
        while len(ray_cluster.raylets) > 2:
            ray_cluster.remove()


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
