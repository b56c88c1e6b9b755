"""`mlx` with a real cluster: a head and two raylets on loopback, with a token.

All tests share the cluster, with different runs or jobs; the last one kills the head. `test_cluster_*.py`
have others.
"""

import contextlib
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_users import LONG, TOKEN, User, until
from clusters import RayCluster
from conftest import KEYS, edit

from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.snapshots import Upload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEP = "self.scheduler.step()"


@pytest.fixture(scope="module")
def launched(user: User, ray_cluster: RayCluster) -> "subprocess.CompletedProcess[str]":
    """A run of three epochs, launched without a conf.yaml, and followed to its end."""
    (user.folder / "src" / "conf.yaml").unlink()
    return subprocess.run(
        ["make", "-s", "launch", f"RAY_ADDRESS={ray_cluster.url}", "ARGS=-f cfg.num_epochs=3"],
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
        until(lambda: dashboard.state("where").ended)
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


@pytest.fixture(scope="class")
def long_run(user: User, ray_cluster: RayCluster, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """`run_002`, launched through a proxy; it never ends by itself, and leaves the cores to the tests."""
    edit(user.folder / "src" / "experiment.py", STEP, f"{STEP}, __import__('time').sleep(0.02)")
    proxy = Proxy(ray_cluster.dashboard)
    done = user.types("train", "launch", *LONG, RAY_ADDRESS=f"127.0.0.1:{proxy.port}")
    assert done.returncode == 0, done.stdout + done.stderr
    yield proxy
    proxy.close()


class TestSweep:
    """A sweep whose driver is a job: its trials start there, and their workers on the cluster."""

    SHORT = ("cfg.name=tuning", "tools.early_stopping.patience=1000")

    def test_its_runs_are_those_of_folds(self, user: User, ray_cluster: RayCluster) -> None:
        """The job splits the rows; all runs of a fold hold out the same ones."""
        grid = ("optimizers.adam.lr=1e-3,1e-2", "cfg.num_epochs=3", "cfg.start_workers=1", "--folds", "2")
        words = (*self.SHORT, *grid, "--name", "shared", "--parallel", "2")
        done = user.types("train", "launch", "--sweep", "--ray-address", ray_cluster.url, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "job       tuning-sweep_shared" in done.stdout.splitlines()
        until(lambda: user.record("sweep_shared", "tuning")["status"] not in ("PENDING", "RUNNING"), 400)
        assert user.record("sweep_shared", "tuning")["status"] == "SUCCEEDED"
        runs = [user.record(run, "tuning") for run in self.runs(user, "shared")]
        ends = [(run["status"], run["epoch"], run["engine"]["used"]) for run in runs]
        assert ends == [("SUCCEEDED", 2, "ray")] * 4
        assert min(run["start"] for run in runs[1:]) < runs[0]["end"]
        held_out = [run["fold"]["rows"] for run in runs[:2]]
        assert len({*held_out}) == 2
        for run, (lr, fold) in zip(runs, itertools.product(("0.001", "0.01"), range(2)), strict=True):
            assert run["sweep"]["values"] == {"optimizers.adam.lr": lr}
            assert run["fold"] == {"fold": fold, "folds": 2, "rows": held_out[fold]}
        table = user.types("xp", "logs", "tuning", "sweep_shared", "--no-follow").stdout
        assert re.search(r"^best +trial \d, val/accuracy 0\.\d+ ± 0\.\d+ \(epoch \d+\)$", table, re.MULTILINE)

    @staticmethod
    def runs(user: User, name: str) -> list[str]:
        """Return the names of the runs that a sweep has begun."""
        return [run for trial in user.record(f"sweep_{name}", "tuning")["trials"] for run in trial["runs"] if run]


class TestALongRun:
    """A launch that is followed, disconnected, stopped and resumed; in the end the cluster dies."""

    def test_a_log_outlives_dropped_connections(self, long_run: Proxy, user: User) -> None:
        until(lambda: user.record("run_002").get("epoch") or 0)
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
                seen = len(until(epochs))
                long_run.cut()
                until(lambda seen=seen: len(epochs()) > seen + 3)
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
        until(lambda: ray_cluster.get("/api/jobs/digits-run_002")["status"] == "STOPPED")
        done = user.types("train", "launch", "--ray-address", ray_cluster.url, "--resume", "run_002")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "job       digits-run_002.2" in done.stdout
        until(lambda: user.record("run_002").get("epoch", 0) > epoch)
        record = user.record("run_002")
        assert (record["status"], len(record["attempts"])) == ("RUNNING", 1)
        assert record["attempts"][0]["job"]["id"] == "digits-run_002"

    def test_the_head_dies_and_all_can_still_be_read(
        self, long_run: Proxy, user: User, ray_cluster: RayCluster
    ) -> None:
        ray_cluster.kill_head()
        rows = {row["run"]: row for row in json.loads(user.types("xp", "ls", "digits", "--json").stdout)}
        assert rows["run_001"]["status"] == "SUCCEEDED"
        until(lambda: "STALE" in user.types("xp", "ls", "digits", "--status", "STALE").stdout)
        log = user.types("xp", "logs", "digits", "run_002")
        assert log.returncode == 1  # the run did not end as it should
        assert log.stderr.endswith("Resume: mlx train launch --resume=digits/run_002\n")
        assert re.search(r"^--- .*: attempt 2$", log.stdout, re.MULTILINE)
        done = user.types("train", "launch", "--ray-address", ray_cluster.url)
        assert done.returncode == 1
        assert f"{ray_cluster.url} (from --ray-address) does not answer" in done.stdout
