"""`mlx` with a real cluster: a head and two raylets on loopback, with a token.

All tests share the cluster, with different runs or jobs; the last one kills the head. `test_cluster_folder.py`
has another one.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_users import LONG, TOKEN, User
from clusters import RayCluster
from conftest import KEYS, Mlx, edit
from faults import differences, final_state, wait_for

from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.snapshots import Upload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEP = "self.scheduler.step()"


@pytest.fixture(scope="module")
def launched(user: User, ray_cluster: RayCluster) -> "subprocess.CompletedProcess[str]":
    """A run of three epochs that prepares its datasets, launched without a conf.yaml, and followed to its end."""
    (user.folder / "src" / "conf.yaml").unlink()
    return subprocess.run(
        ["make", "-s", "launch", f"RAY_ADDRESS={ray_cluster.url}", "ARGS=-f cfg.num_epochs=3 --prepare-batches"],
        cwd=user.folder,
        env=user.environment,
        capture_output=True,
        text=True,
        timeout=560,
    )


class TestOneRun:
    """launch → ls → logs → board of a run that succeeded."""

    def test_it_tells_what_to_type_next(
        self, launched: "subprocess.CompletedProcess[str]", ray_cluster: RayCluster, user: User
    ) -> None:
        assert launched.returncode == 0, launched.stdout + launched.stderr
        folder = user.folder / "runs" / "digits" / "run_001"
        for line in (
            f"checking  {ray_cluster.url} (from RAY_ADDRESS)",
            "run       digits run_001",
            f"folder    {folder}",
            "job       digits-run_001",
            f"dashboard {ray_cluster.url}/#/jobs/digits-run_001",
            "follow    mlx xp logs digits run_001",
            "workers   2 DDP workers in Ray cluster with 4 CPUs",
        ):
            assert line in launched.stdout.splitlines()
        assert re.search(r"^ *3/3 ", launched.stdout, re.MULTILINE)
        assert launched.stderr == ""
        assert "datasets.train is prepared: " in launched.stdout
        assert "train" in user.record()["prepared"]

    def test_no_secret_shows(
        self, launched: "subprocess.CompletedProcess[str]", ray_cluster: RayCluster, user: User
    ) -> None:
        entry = json.dumps(ray_cluster.get("/api/jobs/digits-run_001"))
        log = ray_cluster.get("/api/jobs/digits-run_001/logs")["logs"]
        files = [file for file in (user.folder / "runs").rglob("*") if file.suffix in (".json", ".yaml", ".log")]
        assert len(files) >= 5  # the record, the config, the driver's log and the workers'
        for text in (entry, log, *(file.read_text() for file in files)):
            assert TOKEN not in text

    def test_the_job_runs_the_runtime_that_was_uploaded(
        self, launched: "subprocess.CompletedProcess[str]", user: User, ray_cluster: RayCluster, monkeypatch: Any
    ) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        dashboard = Dashboard.connect(Address(ray_cluster.url, "here"))
        command = ["python", "-c", "import mlx_runtime; print(mlx_runtime.__file__)"]
        dashboard.submit("where", JobSpec(command, Upload.of(user.folder)))
        wait_for(lambda: dashboard.state("where").ended)
        assert "/runtime_resources/" in dashboard.log("where")


class Proxy:
    """Forwards connections until they are cut.

    Args:
        port: port on this machine.
        key: key that must sign the requests, as S3 requires.
    """

    def __init__(self, port: int, key: str | None = None) -> None:
        self._to, self._key = port, key
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self.cuts = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self.cuts += bool(self._open)
        for item in self._open:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                if self._key is not None and f"Credential={self._key}/".encode() not in here.recv(
                    1 << 16, socket.MSG_PEEK
                ):
                    here.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    here.close()
                    continue
                there = socket.create_connection(("127.0.0.1", self._to))
                self._open += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for item in (source, target):
            item.close()


def test_the_token_is_asked_for_and_checked(user: User, ray_cluster: RayCluster, bound: Path, tmp_path: Path) -> None:
    nobody = {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    done = user.types("train", "launch", "--ray-address", ray_cluster.url, **nobody)
    assert done.returncode == 1
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("y" * 32)  # as left by a Ray started for `mlx train run`
    own = user.types("train", "launch", "--ray-address", ray_cluster.url, **nobody)
    assert "refuses the token from" in own.stdout
    assert (
        "which Ray writes for its clusters on this machine. Set RAY_AUTH_TOKEN to the token of this cluster"
        in own.stdout
    )
    assert f"the cluster at {ray_cluster.url} (from --ray-address) requires a token. Set RAY_AUTH_TOKEN" in done.stdout
    done = user.types("train", "launch", RAY_AUTH_TOKEN="x" * 32, RAY_ADDRESS=ray_cluster.url)
    assert done.returncode == 1
    assert f"{ray_cluster.url} (from RAY_ADDRESS) refuses the token from RAY_AUTH_TOKEN" in done.stdout
    assert not (bound / "runs").exists()


def test_the_check_finds_everything_that_is_wrong_at_once(user: User, ray_cluster: RayCluster, s3: str) -> None:
    """A node without keys for the storage, no room, an unset variable, and no such network interface."""
    there = re.search(r":(\d+)&", s3)
    assert there is not None
    proxy = Proxy(int(there[1]), KEYS["AWS_ACCESS_KEY_ID"])
    storage = s3.format("checked").replace(there[1], str(proxy.port))
    ray_cluster.add(cpus=1, environment={"AWS_ACCESS_KEY_ID": "another"})
    ray_cluster.wait(3)
    try:
        options = [f"cfg.storage_path='{storage}'", "cfg.start_workers=50", "cfg.secrets=[WANDB_API_KEY]"]
        options.append("cfg.runtime_env={env_vars: {GLOO_SOCKET_IFNAME: eth9}}")
        done = user.types("train", "launch", "--address", ray_cluster.url, "--check", *options)
    finally:
        ray_cluster.remove()
        proxy.close()
    assert done.returncode == 1
    found = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))}
    failed = {name for name, line in found.items() if line.startswith("FAIL")}
    assert (failed, "torch" in found) == ({"storage", "secrets", "network", "capacity"}, True)
    assert "cfg.start_workers=50 needs 50 CPUs; the cluster has room for 5" in found["capacity"]
    assert re.search(r"WANDB_API_KEY is missing on \d+ of \d+ nodes?: [\d.]+", found["secrets"])
    reason = r"the nodes cannot form a process group: [\d.]+: .*Unable to find address for: eth9\. Set GLOO_SOCKET_"
    assert re.search(reason + r"IFNAME and .* in cfg\.runtime_env\.env_vars .* open all TCP ports", found["network"])
    jobs = {str(job["submission_id"]): job["status"] for job in ray_cluster.get("/api/jobs/")}
    assert {status for job, status in jobs.items() if job.startswith("mlx-check")} == {"SUCCEEDED"}


def test_a_job_that_dies_as_it_starts_shows_why(user: User, ray_cluster: RayCluster, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(user.folder, tmp_path / "digits", ignore=shutil.ignore_patterns("runs")))
    edit(folder / "main.py", "import sys", "import os\nimport sys\n\nassert 'MLX_JOB' not in os.environ, 'not here'")
    other = User(folder, user.environment, user.commands)
    done = other.types("train", "launch", "--retries=3", "--ray-address", ray_cluster.url)
    assert done.returncode == 1
    assert "failed during startup" in done.stderr
    assert "retry" not in done.stderr.replace("retries", "")  # it would fail again
    assert "AssertionError: not here" in done.stderr
    assert "FAILED" in other.types("xp", "ls", "digits").stdout


def test_a_run_on_an_object_store(user: User, ray_cluster: RayCluster, s3: str) -> None:
    """Launch, list and read a run that has nothing in a folder that both sides see."""
    there, words = {"MLX_STORAGE": s3.format("launched")}, ("cfg.num_epochs=2", "cfg.start_workers=1")
    done = user.types("train", "launch", "--ray-address", ray_cluster.url, "-f", *words, **there)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(user.types("xp", "ls", "--json", **there).stdout)
    assert [(row["run"], row["status"], row["epoch"]) for row in rows] == [("run_001", "SUCCEEDED", 2)]
    kept = RunFolder(user.folder, s3.format("launched/digits/run_001")).read("logs/driver.log")
    assert re.search(r"^ *2/2 ", kept.decode(), re.MULTILINE)


def test_a_killed_driver_resumes_as_if_nothing_had_happened(
    launched: object, user: User, ray_cluster: RayCluster
) -> None:
    words = ("--name=killed", "--retries=1", "cfg.num_epochs=3", "cfg.checkpoint_every_steps=5")
    done = user.types("train", "launch", "--ray-address", ray_cluster.url, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: user.record(name="killed").get("latest"))
    os.kill(user.record(name="killed")["pid"], signal.SIGKILL)
    log = user.types("xp", "logs", "killed", "run_001")  # follows both drivers
    assert log.returncode == 0, log.stdout + log.stderr
    assert "retry     the driver was killed by SIGKILL (out of memory?); retry 1 of 1 begins at " in log.stdout
    record, runs = user.record(name="killed"), user.folder / "runs"
    assert (record["status"], record["attempt"], record["epoch"]) == ("SUCCEEDED", 2, 2)
    (first,) = json.loads(user.types("xp", "ls", "killed", "--json").stdout)[0]["attempts"]
    assert (first["status"], first["error"]) == ("FAILED", "the driver was killed by SIGKILL (out of memory?)")
    assert first["job"] == record["job"]
    assert differences(final_state(runs / "digits/run_001"), final_state(runs / "killed/run_001")) == []


def test_a_stopped_data_job_resumes_with_its_finished_items(
    ray_cluster: RayCluster, baked_job: Path, mlx: Mlx, tmp_path: Path
) -> None:
    """All items but the first wait for a file, in two tasks at a time."""
    shards = Path(shutil.copytree(baked_job, tmp_path / "shards"))
    assert mlx(shards, "data", "bind").returncode == 0
    types = partial(mlx, shards, RAY_AUTH_TOKEN=TOKEN, RAY_ADDRESS=ray_cluster.url)
    job, load = shards / "src" / "job.py", "        digits = load_digits()\n"
    edit(job, load, f"        while first and not Path({str(shards / 'go')!r}).exists(): time.sleep(0.1)\n{load}")
    edit(job, "import io\n", "import io\nimport time\nfrom pathlib import Path\n")
    done = types("data", "launch", "images.per_shard=600")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "follow    mlx data logs shards run_001" in done.stdout.splitlines()
    assert "stop      mlx data stop shards run_001" in done.stdout.splitlines()
    items = shards / "storage/.jobs/shards/run_001/logs/items.jsonl"
    wait_for(lambda: items.exists() and items.read_text().endswith("\n"))
    done = types("data", "stop", "shards")
    assert (done.returncode, done.stdout) == (0, "shards run_001 is STOPPED\n"), done.stderr
    job = json.loads(types("data", "ls", "--json").stdout)[0]["job"]["id"]  # other jobs have had this name
    wait_for(lambda: ray_cluster.get(f"/api/jobs/{job}")["status"] == "STOPPED")
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


def test_the_runs_of_a_sweep_are_those_of_folds(user: User, ray_cluster: RayCluster) -> None:
    """The driver of a sweep is a job, which splits the rows; the workers of its trials start on the cluster."""
    words = ("cfg.name=tuning", "cfg.num_epochs=3", "cfg.start_workers=1", "tools.early_stopping.patience=1000")
    options = ("--folds", "2", "--name", "shared", "--parallel", "2")
    done = user.types("train", "launch", "--sweep", "--ray-address", ray_cluster.url, *words, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job       tuning-sweep_shared" in done.stdout.splitlines()
    wait_for(lambda: user.record("sweep_shared", "tuning")["status"] not in ("PENDING", "RUNNING"), 400)
    sweep = user.record("sweep_shared", "tuning")
    assert sweep["status"] == "SUCCEEDED"
    runs = [user.record(run, "tuning") for trial in sweep["trials"] for run in trial["runs"]]
    ends = [(run["status"], run["epoch"], run["engine"]["used"]) for run in runs]
    assert ends == [("SUCCEEDED", 2, "ray")] * 2
    assert runs[1]["start"] < runs[0]["end"]
    assert [(run["fold"]["fold"], run["fold"]["folds"]) for run in runs] == [(0, 2), (1, 2)]
    assert len({run["fold"]["rows"] for run in runs}) == 2
    table = user.types("xp", "logs", "tuning", "sweep_shared", "--no-follow").stdout
    assert re.search(r"^best +trial 1, val/accuracy 0\.\d+ ± 0\.\d+ \(epoch \d+\)$", table, re.MULTILINE)


@pytest.fixture(scope="class")
def long_run(user: User, ray_cluster: RayCluster) -> Iterator[Proxy]:
    """`run_002`, launched through a proxy; it never ends by itself, and leaves the cores to the tests."""
    edit(user.folder / "src" / "experiment.py", STEP, f"{STEP}, __import__('time').sleep(0.02)")
    proxy = Proxy(ray_cluster.dashboard)
    done = user.types("train", "launch", *LONG, RAY_ADDRESS=f"127.0.0.1:{proxy.port}")
    assert done.returncode == 0, done.stdout + done.stderr
    yield proxy
    proxy.close()


class TestALongRun:
    """A launch that is followed, disconnected, stopped and resumed; in the end the cluster dies."""

    def test_a_log_outlives_dropped_connections(self, long_run: Proxy, user: User) -> None:
        wait_for(lambda: user.record("run_002").get("epoch") or 0)
        address = f"http://127.0.0.1:{long_run.port}"
        follower = user.starts("xp", "logs", "-f", "digits", "run_002", RAY_ADDRESS=address)
        assert follower.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(follower.stdout))
        reader.start()

        def epochs() -> list[int]:
            return [int(found[1]) for line in lines if (found := re.match(r" *(\d+)/", line))]

        try:
            for _ in range(3):
                seen = len(wait_for(epochs))
                long_run.cut()
                wait_for(lambda seen=seen: len(epochs()) > seen + 3)
        finally:
            follower.send_signal(signal.SIGINT)
        assert follower.wait(120) == 130
        reader.join()
        assert follower.stderr is not None
        assert follower.stderr.read().strip() == "the run continues; only its log was closed"
        assert long_run.cuts == 3
        assert epochs() == list(range(1, len(epochs()) + 1))  # no duplicates, none missing
        assert user.record("run_002")["status"] == "RUNNING"

    def test_ps_shows_its_workers(self, long_run: Proxy, user: User) -> None:
        done = user.types("xp", "ps", "digits", "2", "--json")
        assert done.returncode == 0, done.stderr
        workers = json.loads(done.stdout)["workers"]
        assert [worker["rank"] for worker in workers] == list(range(len(workers)))
        assert all(worker["at"].startswith("src/") and worker["pid"] > 0 for worker in workers)

    def test_stop_then_go_on(self, long_run: Proxy, user: User, ray_cluster: RayCluster) -> None:
        done = user.types("xp", "stop", "digits", "2")
        assert (done.returncode, done.stdout) == (0, "digits run_002 is STOPPED\n")
        epoch = user.record("run_002")["latest"]["epoch"]
        last = user.types("xp", "logs", "-f", "digits", "run_002", "--tail", "1")
        assert last.returncode == 143
        wait_for(lambda: ray_cluster.get("/api/jobs/digits-run_002")["status"] == "STOPPED")
        done = user.types("train", "launch", "--ray-address", ray_cluster.url, "--resume", "run_002")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "job       digits-run_002.2" in done.stdout
        wait_for(lambda: user.record("run_002").get("epoch", 0) > epoch)
        record = user.record("run_002")
        assert (record["status"], len(record["attempts"])) == ("RUNNING", 1)
        assert record["attempts"][0]["job"]["id"] == "digits-run_002"

    def test_the_head_dies_and_all_can_still_be_read(
        self, long_run: Proxy, user: User, ray_cluster: RayCluster
    ) -> None:
        ray_cluster.kill_head()
        rows = {row["run"]: row for row in json.loads(user.types("xp", "ls", "digits", "--json").stdout)}
        assert rows["run_001"]["status"] == "SUCCEEDED"
        wait_for(lambda: "STALE" in user.types("xp", "ls", "digits", "--status", "STALE").stdout)
        log = user.types("xp", "logs", "digits", "run_002")
        assert log.returncode == 1  # the run did not end as it should
        assert log.stderr.endswith("Resume: mlx train launch --resume=digits/run_002\n")
        assert re.search(r"^--- .*: attempt 2$", log.stdout, re.MULTILINE)
        done = user.types("train", "launch", "--ray-address", ray_cluster.url)
        assert done.returncode == 1
        assert f"{ray_cluster.url} (from --ray-address) does not answer" in done.stdout
