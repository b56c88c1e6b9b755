"""Data jobs on a real cluster."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_users import TOKEN, Types, User, until
from clusters import RayCluster
from conftest import Mlx, edit

from mlx_runtime.storage.files import storage_at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_plan_for_the_nodes_of_the_cluster(user: User, ray_cluster: RayCluster) -> None:
    """Each stage trains on the node that the plan names: here, in another order than Ray's."""
    nodes = {str(at): {"IP": f"127.0.0.{at}", "benchmarks": {"ram": 8, "bandwidth": 100}} for at in range(2)}
    (user.folder / "nodes.json").write_text(json.dumps(nodes))
    done = user.types("train", "clusterize", "--nodes=nodes.json", "--clusters=1", "--all-nodes")
    assert done.returncode == 0, done.stdout + done.stderr
    following = re.search(r"(cfg.strategy=pipeline .*)", done.stdout)
    assert following is not None
    file = user.folder / "src" / "fragments.json"
    plan = json.loads(file.read_text())
    root, leaf = plan["clusters"][0]["stages"]
    assert {root["node"], leaf["node"]} == {"node_0", "node_1"}
    root["node"], leaf["node"] = "node_1", "node_0"
    file.write_text(json.dumps(plan))
    loop = user.folder / "src" / "experiment.py"
    line = "        self.models.net = prepare_model(self.models.net)  # DDP\n"
    code = """\
        import ray
        held = sum(item.numel() for item in self.models.net.parameters() if not item.is_meta)
        print("on", ray.get_runtime_context().get_node_labels()["node"], "are", held)
"""
    edit(loop, line, code + line)
    words = ["cfg.start_workers=2", *following[1].split(), "cfg.num_epochs=1"]
    done = user.types("train", "launch", "-f", *words, RAY_ADDRESS=ray_cluster.url)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(user.folder / f"runs/digits/run_001/logs/rank_{rank}.log").read_text() for rank in (0, 1)]
    found = [re.findall(r"on (\w+) are (\d+)", log) for log in logs]
    assert sorted(found) == [[("node_0", str(leaf["parameters"]))], [("node_1", str(root["parameters"]))]]
    file.write_text(file.read_text().replace("node_1", "node_7"))
    done = user.types("train", "launch", "-f", *words, RAY_ADDRESS=ray_cluster.url)
    assert (done.returncode, "error: the plan has a stage on node node_7, but the" in done.stdout) == (1, True)


def test_a_lost_node_of_a_plan(
    user: User, ray_cluster: RayCluster, make_in: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """The run waits for a node with the same name."""
    at = User(make_in("faults", tmp_path / "runs"), user.environment, user.commands)
    stages = [{"node": f"node_{number}", "first": number, "last": number} for number in range(3)]
    plan = {"model": "net", "blocks": ["layers.0", "layers.1", "layers.3"], "clusters": [{"stages": stages}]}
    (at.folder / "src" / "fragments.json").write_text(json.dumps(plan))
    words = ("cfg.strategy=pipeline", "cfg.fragments.plan=src/fragments.json", "cfg.start_workers=3")
    words += ("cfg.num_epochs=2", "cfg.checkpoint_every_steps=5", "cfg.pause_s=10", "cfg.pause_from=6")
    ray_cluster.add(cpus=2, labels={"node": "node_2"})
    try:
        ray_cluster.wait(3)
        options = ("--name=patient", *words, f"cfg.out={tmp_path / 'patient'}")
        done = at.types("train", "launch", "--ray-address", ray_cluster.url, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: at.record(name="patient").get("latest"))
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

    def test_a_job_fills_the_shared_storage(self, shards: Path, types: Types) -> None:
        """Launch and follow to the end; launching again is refused before anything is uploaded."""
        done = types("data", "launch", "--follow", "images.per_shard=300", "cfg.start_workers=3")
        assert done.returncode == 0, done.stdout + done.stderr
        made = shards / "storage" / "data" / "shards"
        lines = done.stdout.splitlines()
        assert lines[0].startswith("checking  http://127.0.0.1:")
        assert lines[1:4] == ["run       shards run_001", f"folder    {made}", "job       data-shards-run_001"]
        assert "workers   3 tasks at a time in Ray cluster with 4 CPUs" in lines
        assert lines[-1] == f"folder    {made}"
        assert len(list(made.glob("*_images.npy"))) == 6
        done = types("data", "launch", "--check")
        assert done.returncode == 2
        assert f"error: {made} already exists, made 20" in done.stderr

        (row,) = json.loads(types("data", "ls", "--json").stdout)
        assert (row["name"], row["run"], row["status"], row["job"]["id"]) == (
            "shards",
            "run_001",
            "SUCCEEDED",
            "data-shards-run_001",
        )
        assert (row["output"], row["files"]) == (str(made), 13)

    def test_an_error_of_the_users_ends_it_with_its_code(self, shards: Path, types: Types) -> None:
        done = types("data", "launch", "-f", "images.size=-1")
        assert done.returncode == 1, done.stdout + done.stderr
        error = done.stdout.partition("\nerror: ")[2]
        assert re.match(r"RuntimeError: .* \(in item \d+\)\n  src/job.py:\d+ in write_shard\n", error)
        assert "mlx_runtime" not in error
        assert storage_at(str(shards / "storage" / "data")).names() == []

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
