"""Commands for a cluster, before and after they are sent, with a cluster that only keeps them."""

import io
import json
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlx_runtime.companions.jobs.launching import JobState
from mlx_runtime.companions.ray import remote
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.errors import ClusterError, UsageError
from mlx_runtime.runs import records

pytestmark = pytest.mark.process

URL = "http://127.0.0.1:1"


class Cluster:
    """Accepts commands, each of which ends with the exit code 3."""

    def __init__(self) -> None:
        self.address, self.spec, self.stopped = Address(URL, "--on"), JobSpec([], None), False  # type: ignore[arg-type]

    def submit(self, _job: str, spec: JobSpec) -> None:
        self.spec = spec

    def forget_ended(self, prefix: str, metadata: Mapping[str, str]) -> None:
        assert prefix.startswith("mlx-command-")
        assert metadata == self.spec.metadata

    def state(self, _job: str, _deadline: float) -> JobState:
        return JobState("SUCCEEDED")

    def follow(self, _job: str, read: Callable[[str], None], seen: int) -> JobState:
        read(f'{self.spec.environment["MLX_ON"]} {{"kind": "exit", "code": 3}}\n')
        return JobState("SUCCEEDED")

    def stop(self, _job: str) -> None:
        self.stopped = True

    def files(self) -> Mapping[str, str]:
        """The files of the experiment that the command has, without the runtime."""
        sent = list[bytes]()

        def send(_name: str, read: Callable[[], bytes]) -> str:
            sent.append(read())
            return ""

        self.spec.pack(send)
        with zipfile.ZipFile(io.BytesIO(sent[-1])) as package:
            return {name: package.read(name).decode() for name in package.namelist() if "mlx_runtime/" not in name}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(Dashboard, "connect", lambda _: cluster)
    return cluster


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/experiment.py").touch()
    Path("src/conf.yaml").write_text("cfg: {name: digits}\n")
    return tmp_path


def test_a_launch_is_checked_before_anything_is_sent(experiment: Path) -> None:
    for words in (["cfg.mirror.token=hf_0123456789abcdefghijklmnopqrstuvwxyz"], ["--name", "x", "a=https://u:p4ss@h"]):
        with pytest.raises(UsageError, match="would show in the dashboard") as caught:
            remote.run(["train", "launch", *words], URL)
        assert "hf_" not in str(caught.value)
        assert "p4ss" not in str(caught.value)
    (experiment / "src/conf.yaml").write_text("cfg: {mirror: {token: hf_0123456789abcdefghijklmnopqrstuvwxyz}}\n")
    with pytest.raises(UsageError, match=r"cfg\.mirror\.token would show in the dashboard"):
        remote.run(["train", "launch"], URL)
    (experiment / "src/conf.yaml").unlink()
    with (experiment / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(ClusterError, match="clusters accept at most"):
        remote.run(["train", "launch"], URL)
    for words in (["--bogus"], ["--sweep", "--bogus", "cfg.seed=1,2"]):
        with pytest.raises(UsageError, match="there is no option --bogus"):
            remote.run(["train", "launch", *words], URL)
    for words in (["data", "launch"], ["train", "launch"]):
        (experiment / "src/experiment.py").unlink(missing_ok=True)
        with pytest.raises(UsageError, match="is not an? "):
            remote.run(words, URL)


def test_commands_that_look_at_runs_get_the_config_only(experiment: Path, cluster: Cluster) -> None:
    (experiment / "src/conf.yaml").write_text("cfg: {name: digits, storage_path: /ceph/runs}\n")
    for words, sent in (
        (["xp", "ls"], {"src/conf.yaml"}),
        (["xp", "export", "1", "-oa"], {"src/conf.yaml", "src/experiment.py"}),
    ):
        assert remote.run(words, URL) == 3
        assert cluster.files().keys() == sent


def test_a_launch_records_what_was_typed_and_all_changes(
    experiment: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    changed = "# 训练模型的参数设置\n" * 10_000
    (experiment / "src/experiment.py").write_text(changed)
    monkeypatch.setattr("sys.orig_argv", ["mlx", "--on", URL, "train", "launch"])
    assert remote.run(["train", "launch"], URL) == 3
    assert sum(map(len, cluster.spec.environment.values())) < 1000
    for path, content in cluster.files().items():
        (experiment / path).write_text(content)
    for name, value in cluster.spec.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "other"])
    found = records.provenance([])
    assert found["command"] == f"mlx --on {URL} train launch"
    assert found["git"]["diff"].count("训练模型的参数设置") == 10_000
    remote.run(["train", "launch"], URL)
    assert json.loads(cluster.files()[".mlx-launched.json"])["command"] == found["command"]
    assert ".mlx-launched.json" not in map(str, (path for path, _ in cluster.spec.upload.files))


def test_folders_of_the_cluster_are_found_in_an_experiment_with_a_storage_of_its_own(
    experiment: Path, cluster: Cluster
) -> None:
    (experiment / "src/conf.yaml").write_text("cfg: {storage_path: ../runs}\n")
    assert remote.run(["xp", "logs", "/ceph/runs/digits/run_001"], URL) == 3
    assert "MLX_STORAGE" not in cluster.spec.environment
    with pytest.raises(UsageError, match=r"the storage \.\./runs is a folder on this machine"):
        remote.run(["xp", "ls"], URL)


def test_what_is_wrong_is_named(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^mlx xp ray does not support --on; mlx xp \(except ray\), .* do$"):
        remote.run(["xp", "ray"], URL)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="Pass --on http://HEAD:8265"):
        remote.run(["xp", "ls"], "")


class Printed(Dashboard):
    """A cluster whose jobs have ended, and have printed a line."""

    line = ""

    def submit(self, job: str, spec: JobSpec) -> None: ...

    def forget_ended(self, prefix: str, metadata: Mapping[str, str]) -> None: ...

    def state(self, job: str, deadline: float = 0.0) -> JobState:
        return JobState("SUCCEEDED")

    def log(self, job: str) -> str:
        return f"of Ray\n{self.line}\n"


def test_the_answer_of_a_short_job_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, spec = Printed(Address(URL, "--on"), "2.60", {}, None), JobSpec([], None)  # type: ignore[arg-type]  # nothing is sent
    monkeypatch.setattr(Printed, "line", 'mlx-key {"job": "job-1"}')
    assert cluster.ask("mlx-launch", spec, marker="mlx-key ", timeout_s=1) == {"job": "job-1"}
    for damaged in ('mlx-key {"job"', "mlx-key [1]", "error: no room"):
        monkeypatch.setattr(Printed, "line", damaged)
        with pytest.raises(ClusterError, match=r"^the job mlx-launch-\w{8} failed: (mlx-key|error: no room)"):
            cluster.ask("mlx-launch", spec, marker="mlx-key ", timeout_s=1)
