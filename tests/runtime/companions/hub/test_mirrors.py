"""Mirrors of runs, on a local Hub (tests/hub_server.py)."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import hostile
import pytest
import torch
from conftest import Mlx, Start
from faults import wait_for
from hub_server import Faults, Hub
from huggingface_hub import HfApi

from mlx_runtime import BaseModule, TrainConfig, open_run
from mlx_runtime.companions.hub import claims, extension, mirror, pushing, remote, repository, restoring
from mlx_runtime.companions.hub.commands import xp_push as push
from mlx_runtime.companions.hub.mirror import Allowance, Follower, Mirror, SupersededError
from mlx_runtime.companions.hub.remote import MirroredRun
from mlx_runtime.companions.hub.repository import Repository
from mlx_runtime.config import composition
from mlx_runtime.driver import request
from mlx_runtime.errors import MlxError, StorageError, UsageError
from mlx_runtime.events import Notice, WarningNotice
from mlx_runtime.runs import records, snapshots
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import PARTS, CheckpointStore, read
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import list_rows
from mlx_runtime.storage.files import Storage, storage_at
from mlx_runtime.storage.leases import this_process

pytestmark = pytest.mark.process

URI = "hf://alice/digits"

WORDS = "hunter2-tell-nobody"
"""A secret."""

CONF = "cfg:\n  monitor: loss\n  mode: min\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub, and the environment of alice."""
    with Hub() as server:
        for name, value in (server.variables() | {"MLX_CACHE": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # it is read on import
        monkeypatch.setattr(repository, "WAIT_S", (0.05, 0.1))
        hasty = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 20)})
        monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)  # its own retries
        yield server


class Following:
    """The thread that mirrors a run, and what it has told the user."""

    def __init__(self, opened: Mirror, training: "Training") -> None:
        self._told: list[Notice] = []
        self._follower = Follower(opened, training.record, training.reasons.append, self._told.append)
        self.saved, self.done = self._follower.checkpoint_saved, self._follower.done

    def notices(self) -> list[Notice]:
        """Return what it has told since the last call."""
        return [self._told.pop(0) for _ in range(len(self._told))]

    def finish(self, timeout_s: float) -> list[Notice]:
        self._follower.finish(timeout_s)
        return self.notices()


class Training:
    """A run on a machine, without the training: `save` adds a checkpoint and a line of metrics."""

    def __init__(self, root: Path | str, attempt: int = 1, folder: RunFolder | None = None) -> None:
        self.folder = folder or claim_run(str(root), "digits")
        assert self.folder.claim_attempt(attempt)
        before = records.load_record(self.folder) if folder is not None else None
        facts = {"attempt": attempt, "monitor": "loss", "mode": "min", "command": "mlx train run", "overrides": ["a=1"]}
        self.record = records.Record(self.folder, before, status="RUNNING", **facts)
        self.record.begin(CONF)
        self.reasons: list[str] = []

    def follow(self, uri: str = URI) -> Following:
        return Following(Mirror(uri), self)

    def save(self, epoch: int, *, seed: int = 0, size: int = 3000) -> CheckpointInfo:
        weight = torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        state = dict.fromkeys(PARTS) | {"models": {"net": {"weight": weight}}, "epoch": epoch}
        saved = CheckpointStore(self.folder.checkpoints)
        made = saved.save(state, CheckpointInfo(epoch, True, 10 * (epoch + 1), {"loss": 1 / (epoch + 1)}))
        saved.prune(2, "loss", "min")
        with self.folder.metrics.open("a") as lines:
            lines.write(json.dumps({"step": 10 * (epoch + 1), "epoch": epoch, "timestamp": 0.0, "loss": 1.0}) + "\n")
        self.folder.push(self.folder.metrics)
        entry = {"epoch": epoch, "path": saved.path(made), "value": 1 / (epoch + 1)}
        self.record.update(latest=entry, best=entry, epoch=epoch, metrics={"loss": 1 / (epoch + 1)})
        return made


def local_files(run: RunFolder) -> dict[str, bytes]:
    files = [*run.path.glob("checkpoints/*/*"), run.metrics, run.conf]
    return {str(file.relative_to(run.path)): file.read_bytes() for file in files}


def remote_files(run: RunFolder) -> dict[str, bytes]:
    """Return the same files of a run on an object store."""
    storage = storage_at(run.location)
    paths = [info.path.removeprefix(f"{storage.path}/") for info in storage.below()]
    chosen = [path for path in paths if path.startswith("checkpoints/") or path in ("metrics.jsonl", "conf.yaml")]
    return {path: storage.read(path) for path in chosen}


def test_a_run_is_mirrored_while_it_trains(server: Hub, tmp_path: Path) -> None:
    """README.md mirror.json run.json conf.yaml metrics.jsonl model.safetensors checkpoints/epoch_000{2,3}/…"""
    training = Training(tmp_path)
    following = training.follow()
    assert records.load_record(training.folder)["mirror"]["unfinished"] is True
    for epoch in range(3):
        training.save(epoch)
        following.saved()
        wait_for(lambda: len(server.commits("alice/digits")) == epoch + 2)  # noqa: B023
    training.record.finish("SUCCEEDED")
    *_, notice = following.finish(60)
    assert "is complete" in notice.text
    assert server.repositories["models/alice/digits"].private
    titles = ["Attempt 1 of digits/run_001", *(f"digits/run_001: step {step}" for step in (10, 20, 30))]
    assert server.commits("alice/digits") == [*titles, "digits/run_001: SUCCEEDED, step 30"]
    files = server.files("alice/digits")
    assert files.items() >= local_files(training.folder).items()
    assert {path.split("/")[1] for path in files if path.startswith("checkpoints/")} == {"epoch_0002", "epoch_0003"}
    assert b"mlx train run a=1" in files["README.md"]
    assert b"| `loss` | 0.3333 |" in files["README.md"]
    from safetensors.torch import load

    weight = CheckpointStore(training.folder.checkpoints).load(CheckpointStore(training.folder.checkpoints).all()[-1])
    assert torch.equal(load(files["model.safetensors"])["net.weight"], weight["models"]["net"]["weight"])
    assert records.load_record(training.folder)["mirror"] == {
        **records.load_record(training.folder)["mirror"],
        "uri": URI,
        "unfinished": False,
    }
    assert len(server.uploads) == len(set(server.uploads))
    assert not (training.folder.path / ".mirror").exists()


@pytest.mark.s3
def test_a_run_on_an_object_store(server: Hub, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mirrored, pushed from a machine without a copy, and continued on a disk."""
    first, downloaded = Training(s3.format(tmp_path.name)), list[str]()
    download = Storage.download
    monkeypatch.setattr(
        Storage, "download", lambda self, file, *path: (downloaded.append(path[-1]), download(self, file, *path))[1]
    )
    following = first.follow()
    for epoch in range(3):
        first.save(epoch)
        following.saved()
        wait_for(lambda: len(server.commits("alice/digits")) == epoch + 2)  # noqa: B023
    first.record.finish("STOPPED")
    assert "is complete" in following.finish(60)[-1].text
    assert server.files("alice/digits").items() >= remote_files(first.folder).items()
    kept = {path.split("/")[1] for path in server.files("alice/digits") if path.startswith("checkpoints/")}
    assert kept == {"epoch_0002", "epoch_0003"}
    assert len([path for path in downloaded if path.endswith(".pt")]) == 3  # each checkpoint once

    copy, _ = restoring.latest(URI, str(tmp_path / "disk"), "digits")
    assert copy is not None
    assert local_files(copy) == remote_files(first.folder)
    second = Training(tmp_path, 2, copy)
    following = second.follow()
    second.save(3, seed=1)
    second.record.finish("STOPPED")
    assert "is complete" in following.finish(60)[-1].text

    root = s3.format(tmp_path.name)
    with pytest.raises(UsageError, match="has a newer state of digits/run_001 than s3://.* downloaded to a folder"):
        restoring.latest(URI, root, "digits")
    with pytest.raises(UsageError, match="only be downloaded to a folder: set cfg.storage_path to one"):
        restoring.latest(URI, s3.format(f"{tmp_path.name}/new"), "digits")


class TestWhatLeaves:
    CODE: ClassVar = {
        "main.py": "",
        "src/__init__.py": "",
        "src/experiment.py": "from src import tools, keys\n",
        "src/tools.py": f"import os\nAPI_KEY = '{WORDS}'\nURL = 'postgres://me:{WORDS}@host'\nWIDTH = 7\n",
        "src/keys.py": "KEY = os.environ['KEY']\ntoken = next_token\npassword = 'x1y2'  # pragma: allowlist secret\n",
    }
    PLACES = "src/tools.py:2, src/tools.py:3 would take a likely secret to hf://alice/digits. Read it from the"

    def run_with_secrets(self, tmp_path: Path, tools: str = "") -> Training:
        training = Training(tmp_path / "runs")
        training.folder.conf.write_text(CONF + tools)
        for name, text in self.CODE.items():
            (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "code" / name).write_text(text)
        snapshots.store(tmp_path / "code", training.folder)
        training.save(0)
        return training

    def test_a_run_with_secrets_in_its_code_is_refused_before_it_begins(
        self, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.run_with_secrets(tmp_path)
        monkeypatch.chdir(tmp_path / "code")
        (tmp_path / "conf.yaml").write_text(
            f"cfg: {{_target_: mlx_runtime.TrainConfig, name: digits, hub: {{mirror: '{URI}'}}}}\n"
        )
        config = request.load_config(Digits, [], tmp_path / "conf.yaml")
        with pytest.raises(UsageError, match=self.PLACES):
            extension.extension(config)
        assert not server.repositories

    def test_a_run_with_secrets_is_not_uploaded(self, server: Hub, tmp_path: Path) -> None:
        training = self.run_with_secrets(tmp_path)
        following = training.follow()
        following.saved()
        training.record.finish("STOPPED")
        assert f"is unfinished: {self.PLACES}" in following.finish(60)[-1].text
        assert set(server.files("alice/digits")) == {".gitattributes", "mirror.json"}
        places = self.PLACES.replace("digits", "other")
        with pytest.raises(UsageError, match=f"{places}.* zip -u code.zip src/tools.py$"):
            pushing.push(training.folder, "hf://alice/other")
        (training.folder.path / "code.zip").unlink()
        training.folder.conf.write_text(f"{CONF}tools:\n  api: {{token: {WORDS}, key: '${{oc.env:KEY}}'}}\n")
        with pytest.raises(UsageError, match=r"^conf.yaml: tools.api.token would take .* edit its conf.yaml$"):
            pushing.push(training.folder, "hf://alice/other")
        assert list(server.repositories) == ["models/alice/digits"]


@pytest.mark.kills
def test_every_tenth_request_fails(server: Hub, tmp_path: Path) -> None:
    server.faults = Faults(0.1, seed=1)
    training = Training(tmp_path)
    following = training.follow()
    for epoch in range(2):
        training.save(epoch)
        following.saved()
        wait_for(lambda: len(server.commits("alice/digits")) >= epoch + 2)  # noqa: B023
    training.record.finish("SUCCEEDED")
    assert "is complete" in following.finish(60)[-1].text
    assert {kind for kind, _, _ in server.faults.injected} == {"429", "503", "cut before", "cut after"}
    titles = server.commits("alice/digits")
    assert len(titles) == len(set(titles)) == 4  # none twice, although some answers were lost
    assert server.files("alice/digits").items() >= local_files(training.folder).items()
    server.faults = Faults(0.1, seed=2)
    copy, _ = restoring.latest(URI, str(tmp_path / "other"), "digits")
    assert copy is not None
    assert local_files(copy) == local_files(training.folder)


def test_checkpoints_that_are_removed_during_an_upload(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training saves three more, and keeps the last two. The mirror has the one that was linked when it was staged."""
    training = Training(tmp_path)
    following = training.follow()
    training.save(0)
    files, calls = Repository.files, iter([True])

    def late(repository: Repository, commit: str) -> Any:
        found = files(repository, commit)
        if next(calls, False):
            for epoch in (1, 2, 3):
                training.save(epoch)
        return found

    monkeypatch.setattr(Repository, "files", late)
    following.saved()
    wait_for(lambda: len(server.commits("alice/digits")) == 2)
    kept = {path.split("/")[1] for path in server.files("alice/digits") if path.startswith("checkpoints/")}
    step = json.loads(server.files("alice/digits")["mirror.json"])["step"]
    assert (kept, step) == ({"epoch_0001"}, 10)
    training.record.finish("STOPPED")
    assert "is complete" in following.finish(60)[-1].text


def test_commits_that_are_refused_forever_are_given_up(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "CONFLICTS_S", (0.0, 0.01, 0.02))
    training = Training(tmp_path)
    training.record.finish("STOPPED")
    claimed = lambda method, path: "/commit/" in path and bool(server.commits("alice/digits"))  # noqa: E731
    server.faults = Faults(1, ("409",), claimed, limit=50)
    with pytest.raises(StorageError, match=r"hf://alice/digits rejected the commit: the repository has changed; try"):
        pushing.push(training.folder, URI)
    assert len(server.faults.injected) == 4


def test_a_run_without_a_mirror_is_pushed_if_it_has_few_files(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path)
    training.save(0)
    training.record.finish("STOPPED")
    with pytest.raises(UsageError, match="has no mirror; name one with --to"):
        pushing.push(training.folder)
    assert pushing.push(training.folder, URI).startswith(f"{URI} is complete")
    assert open_run(URI).record["status"] == "STOPPED"
    monkeypatch.setattr(remote, "MAX_FILES", 2)
    monkeypatch.setattr(mirror, "MAX_FILES", 2)
    server.requests.clear()
    for opened in (open_run, lambda uri: restoring.latest(uri, str(tmp_path / "other"), "digits")):
        with pytest.raises(StorageError, match=r"hf://alice/digits has \d files, of at most 2; nothing was downloaded"):
            opened(URI)
    assert not any("conf.yaml" in path for _, path in server.requests)
    with pytest.raises(UsageError, match=r"the run has \d files; hf://alice/digits may have 2"):
        pushing.push(training.folder, URI)


def test_the_claim_is_refreshed_while_a_large_file_is_uploaded(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "REFRESH_S", 0.05)
    training = Training(tmp_path)
    following = training.follow()
    upload = HfApi.preupload_lfs_files
    times: list[str] = []

    def slowly(api: HfApi, repo_id: str, additions: Any, **options: Any) -> None:
        large = any(addition.path_in_repo.endswith("state.pt") for addition in additions)
        while large and len(times) < 2:  # commits, before this upload ends
            count = len(server.commits("alice/digits"))
            wait_for(lambda count=count: len(server.commits("alice/digits")) > count, 60)
            times.append(json.loads(server.files("alice/digits")["mirror.json"])["time"])
        upload(api, repo_id, additions, **options)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", slowly)
    training.save(0)
    training.record.finish("STOPPED")
    lines = following.finish(600)
    assert "is complete" in lines[-1].text
    assert open_run(URI).record["status"] == "STOPPED"
    assert json.loads(server.files("alice/digits")["mirror.json"])["time"] >= max(times)


@pytest.mark.kills
class TestEnd:
    def test_it_waits_no_longer_than_it_may(self, server: Hub, tmp_path: Path) -> None:
        """What was uploaded by then is not uploaded again by `mlx xp push`."""
        training = Training(tmp_path)
        following = training.follow()
        training.save(0)
        training.record.finish("SUCCEEDED")
        server.faults = Faults(1, ("503",), lambda method, path: "/commit/" in path)
        line = following.finish(1.0)[-1].text
        assert "is unfinished: it was not done within cfg.hub.timeout_s=1" in line
        assert line.endswith("complete it with: mlx xp push digits run_001")
        assert records.load_record(training.folder)["mirror"]["unfinished"] is True
        assert [run.name for run in pushing.unfinished_runs(str(tmp_path))] == ["run_001"]
        wait_for(lambda: len(server.uploads) == 2)  # the state and the weights
        server.faults = Faults()
        following.done.wait(60)  # its process would have exited
        assert "digits/run_001 uploaded" in pushing.push(training.folder)
        assert len(server.uploads) == 2
        assert server.files("alice/digits").items() >= local_files(training.folder).items()
        assert pushing.unfinished_runs(str(tmp_path)) == []

    def test_ctrl_c_ends_the_wait(self, server: Hub, tmp_path: Path) -> None:
        training = Training(tmp_path)
        following = training.follow()
        server.faults = Faults(1, ("503",))
        training.record.finish("SUCCEEDED")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert "is unfinished: the wait for it was interrupted; complete it with" in following.finish(1000)[-1].text

    def test_a_checkpoint_never_waits(self, server: Hub, tmp_path: Path) -> None:
        training = Training(tmp_path)
        following = training.follow()
        server.delay_s = 0.05
        training.save(0)
        for _ in range(100):
            following.saved()
        training.record.finish("SUCCEEDED")
        following.finish(60)
        assert len(server.commits("alice/digits")) <= 3  # those in between were left out


def test_all_that_can_be_pushed_is_pushed(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository of the first run has been deleted, and now belongs to somebody else."""
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path))
    for uri in ("hf://bob/digits", URI):
        training = Training(tmp_path)
        training.save(0)
        training.record.update(mirror={"uri": uri, "id": "none", "unfinished": True})
        training.record.finish("STOPPED")
    with pytest.raises(MlxError, match="1 of 2 runs were not uploaded; see above"):
        push.callback(None, None, None)
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{URI} is complete")
    assert shown.err.startswith("error: your token has no access to hf://bob/digits")


def test_commits_stay_below_the_limit_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(mirror.time, "monotonic", lambda: clock[0])
    allowance, commits = Allowance(), []
    while clock[0] < 7200:
        clock[0] += allowance.wait_s() or 0.1
        if allowance.wait_s() < 1e-6:
            allowance.take()
            commits.append(clock[0])
    busiest = max(sum(start <= moment < start + 3600 for moment in commits) for start in commits)
    assert 90 <= busiest <= 101


class TestTwoMachines:
    def test_the_second_of_two_at_the_same_time_is_refused(self, server: Hub, tmp_path: Path) -> None:
        one, other = Training(tmp_path / "a"), Training(tmp_path / "b")
        server.create("alice/digits")
        first, second = Mirror(URI), Mirror(URI)
        Following(first, one)
        with pytest.raises(SupersededError, match="was taken over by attempt 1 on"):
            Following(second, other)
        assert server.commits("alice/digits") == ["Attempt 1 of digits/run_001"]

    def test_while_another_one_trains(self, server: Hub, tmp_path: Path) -> None:
        training = Training(tmp_path / "a")
        training.follow()
        claim = elsewhere(server, age_s=30)
        message = r"belongs to process \d+ on elsewhere, .*; if it is gone, its claim expires in 5\d\d s"
        with pytest.raises(UsageError, match=message):
            restoring.latest(URI, str(tmp_path / "b"), "digits")
        elsewhere(server, age_s=601)
        assert restoring.latest(URI, str(tmp_path / "b"), "digits") == (None, [])  # no checkpoint yet
        assert claim["attempt"] == 1


def elsewhere(server: Hub, age_s: float, name: str = "alice/digits", **fields: Any) -> dict[str, Any]:
    """Make the latest claim that of another machine, as old as that and with other fields, by a new commit."""
    repository = server.repositories[f"models/{name}"]
    files = repository.commits[-1].files
    claim = json.loads(files["mirror.json"])
    when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age_s))
    claim |= {"time": when, "process": this_process() | {"host": "elsewhere", "boot": "another"}}
    server.commit(repository, "elsewhere", files | {"mirror.json": json.dumps(claim | fields).encode()})
    return claim


@pytest.mark.kills
class TestContinuing:
    def mirrored(self, root: Path, epochs: int) -> Training:
        training = Training(root)
        (training.folder.path / "wandb-run-id").write_text("abc")
        following = training.follow()
        for epoch in range(epochs):
            training.save(epoch)
        training.record.finish("STOPPED")
        assert "is complete" in following.finish(60)[-1].text
        return training

    def test_an_empty_machine(self, server: Hub, tmp_path: Path) -> None:
        training = self.mirrored(tmp_path / "a", 2)
        copy, lines = restoring.latest(URI, str(tmp_path / "b"), "digits")
        assert copy is not None
        assert copy.title == "digits/run_001"
        assert "downloaded digits/run_001" in lines[0]
        assert local_files(copy) == local_files(training.folder)
        assert copy.attempts() == 1
        assert (copy.path / "wandb-run-id").read_text() == "abc"  # the run stays one run there
        assert records.load_record(copy)["best"]["path"] == f"{copy.path}/checkpoints/epoch_0002"
        assert restoring.latest(URI, str(tmp_path / "b"), "digits") == (copy, [])

    def test_another_run_has_its_name(self, server: Hub, tmp_path: Path) -> None:
        self.mirrored(tmp_path / "a", 1)
        Training(tmp_path / "b")
        copy, _ = restoring.latest(URI, str(tmp_path / "b"), "digits")
        assert copy is not None
        assert copy.name == records.load_record(copy)["run"] == "run_002"

    def test_the_newest_attempt_wins_then_the_step(self, server: Hub, tmp_path: Path) -> None:
        training = self.mirrored(tmp_path / "a", 2)
        copy, _ = restoring.latest(URI, str(tmp_path / "b"), "digits")
        training.save(2)  # not mirrored
        run, lines = restoring.latest(URI, str(tmp_path / "a"), "digits")
        assert run == training.folder
        assert lines[0].endswith("attempt 1, step 20; digits/run_001 here has attempt 1, step 30: continuing from here")
        second = Training(tmp_path, 2, copy)
        following = second.follow()
        second.save(2, seed=1)
        second.record.finish("STOPPED")
        assert "is complete" in following.finish(60)[-1].text
        with pytest.raises(UsageError, match="which is newer than digits/run_001 here .*--resume auto"):
            Mirror(URI).check(training.folder)
        run, lines = restoring.latest(URI, str(tmp_path / "a"), "digits")
        assert run == training.folder
        states = "attempt 2, step 30; digits/run_001 here has attempt 1, step 30"
        assert lines[0].endswith(f"{states}: continuing from the mirror")
        assert local_files(training.folder) == local_files(second.folder)
        (aside,) = training.folder.path.glob("replaced_*")
        assert (aside / "checkpoints" / "epoch_0003").is_dir()

    def test_a_download_that_fails_leaves_nothing(self, server: Hub, tmp_path: Path) -> None:
        self.mirrored(tmp_path / "a", 1)
        server.faults = Faults(1, ("403",), lambda method, path: path.endswith("state.pt"))
        with pytest.raises(MlxError, match="your token has no access to hf://alice/digits"):
            restoring.latest(URI, str(tmp_path / "b"), "digits")
        assert list((tmp_path / "b" / "digits").iterdir()) == []


class TestReading:
    def test_open_run_and_listing(self, server: Hub, tmp_path: Path) -> None:
        training = Training(tmp_path)
        following = training.follow()
        training.save(0)
        following.saved()
        wait_for(lambda: len(server.commits("alice/digits")) == 2)
        first = server.repositories["models/alice/digits"].commits[-1].sha
        training.save(1)
        training.record.finish("SUCCEEDED")
        following.finish(60)
        found = open_run(URI)
        assert (found.record["status"], found.config["cfg"]["monitor"]) == ("SUCCEEDED", "loss")
        assert found.metrics()["step"].tolist() == [10, 20]
        asked = len(server.requests)
        assert found.state()["epoch"] == 1
        assert [path for _, path in server.requests[asked:] if path.endswith(".pt")]  # only now
        assert open_run(f"{URI}@{first}").state("best")["epoch"] == 0
        assert lookup.resolve_checkpoint(URI)[1].endswith("/digits/run_001/checkpoints/epoch_0002")
        assert lookup.resolve_checkpoint(URI, "epoch_0001")[1].endswith("/digits/run_001/checkpoints/epoch_0001")
        assert read(URI)["epoch"] == 1
        assert read(f"{URI}/checkpoints/epoch_0001")["epoch"] == 0
        with pytest.raises(UsageError, match="hf://alice/digits has no checkpoint epoch_0009"):
            read(f"{URI}/checkpoints/epoch_0009")
        (tmp_path / "conf.yaml").write_text("cfg: {name: digits}\n")
        composed = composition.read(tmp_path / "conf.yaml", [])
        origin = request.choose_run(request.Request(origin=URI), Digits, composed).origin
        assert origin is not None
        assert origin.conf.read_text() == CONF
        last = server.repositories["models/alice/digits"].commits[-1].sha
        config = SimpleNamespace(
            cfg=SimpleNamespace(restore_checkpoint_path=URI), tree={"cfg": {}}, unresolved={"cfg": {}}
        )
        request.pin_checkpoint(config)  # type: ignore[arg-type]
        assert config.cfg.restore_checkpoint_path == f"{URI}@{last}/checkpoints/epoch_0002"
        assert config.tree == config.unresolved == {"cfg": vars(config.cfg)}
        assert read(config.cfg.restore_checkpoint_path)["epoch"] == 1
        with pytest.raises(UsageError, match="which has no logs and no driver; mlx xp ls, mlx train eval"):
            lookup.resolve_run(URI)
        (row,) = list_rows(URI)
        assert (row.status, row.fields()["place"], row.best) == ("SUCCEEDED", URI, 0.5)


class Digits(BaseModule):
    cfg: TrainConfig


RECORD = {"experiment": "digits", "run": "run_001", "status": "SUCCEEDED"}


class TestHostileRepositories:
    """Whatever a repository holds, nothing is written outside of the cache and the storage."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "precious").write_text("precious")
        return tmp_path / "outside"

    def offered(self, server: Hub, files: dict[str, bytes] | None = None, **claim: Any) -> None:
        """Put a run into the repository, with other fields of its claim, or other files."""
        held = json.loads(claims.Claim.of("1", "digits", "run_001", 1).content()) | {"status": "SUCCEEDED"} | claim
        found = {"mirror.json": json.dumps(held).encode(), "run.json": json.dumps(RECORD).encode()}
        server.create("alice/digits", found | {"conf.yaml": CONF.encode(), "metrics.jsonl": b""} | (files or {}))

    def refused(self, tmp_path: Path, experiment: str = "digits") -> None:
        for opened in (
            lambda: open_run(URI),
            lambda: restoring.latest(URI, str(tmp_path / "runs"), experiment),
            lambda: Mirror(URI).check(None),
        ):
            with pytest.raises(MlxError) as caught:
                opened()
            assert "\n" not in str(caught.value)
        assert not (tmp_path / "cache" / "hub").exists()
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("field", ["experiment", "run"])
    def test_names_in_the_claim(self, server: Hub, tmp_path: Path, outside: Path, field: str) -> None:
        before = hostile.tree(outside)
        for name in hostile.names(outside):
            self.offered(server, **{field: name})
            self.refused(tmp_path, name if field == "experiment" and isinstance(name, str) else "digits")
            assert hostile.tree(outside) == before, name
        assert {path.name for path in tmp_path.iterdir()} == {"outside", "cache"} & {*os.listdir(tmp_path)}
        self.offered(server)
        assert open_run(URI).record["run"] == "run_001"

    def test_paths_of_files(self, server: Hub, tmp_path: Path, outside: Path) -> None:
        before = hostile.tree(outside)
        elsewhere = [name for name in hostile.TEXTS if not hostile.is_path(name)]
        for path in (*elsewhere, *(f"{name}/checkpoint.json" for name in elsewhere if len(name) < 99), f"{outside}/x"):
            self.offered(server, {f"checkpoints/{path}": b"theirs"})
            with pytest.raises(MlxError, match="lists a file .* which mlx never uploads; nothing was downloaded"):
                open_run(URI)
            with pytest.raises(MlxError, match="lists a file"):
                restoring.latest(URI, str(tmp_path / "runs"), "digits")
            assert not (tmp_path / "runs").exists()
            assert hostile.tree(outside) == before

    def test_hidden_files_and_files_in_the_way(self, server: Hub, tmp_path: Path) -> None:
        """Names with which this machine keeps its own records are not downloaded."""
        self.offered(server, {".attempt-900": b"", ".stop": b"", ".cache/huggingface/x": b"", "logs/rank_0.log": b""})
        run, _ = restoring.latest(URI, str(tmp_path / "runs"), "digits")
        assert run is not None
        assert run.attempts() == 1
        assert sorted(os.listdir(run.path)) == [".attempt-001", "checkpoints", "conf.yaml", "metrics.jsonl", "run.json"]
        found = MirroredRun.find(URI).fetch().path
        assert sorted(os.listdir(found)) == [".cache", "conf.yaml", "logs", "metrics.jsonl", "run.json"]
        for files in ({"checkpoints": b"a file"}, {"run.json/x": b""}, {"run.json": b"[]"}, {"run.json": b"\xff"}):
            self.offered(server, files, id="2")
            with pytest.raises(MlxError) as caught:
                restoring.latest(URI, str(tmp_path / "runs"), "digits")
            assert "\n" not in str(caught.value)
            assert os.listdir(tmp_path / "runs" / "digits") == ["run_001"]

    @pytest.mark.parametrize("file", ["mirror.json", "run.json", "conf.yaml", "metrics.jsonl"])
    def test_broken_documents(self, server: Hub, tmp_path: Path, outside: Path, file: str) -> None:
        """Each is read, or refused in one line; a listing has one row in any case."""
        before = hostile.tree(outside)
        for number, content in enumerate(hostile.BROKEN_JSON[::4]):
            self.offered(server, {file: content + b"\n"}, id=str(number))
            readers: list[Callable[[], Any]] = [lambda: open_run(URI).record, lambda: open_run(URI).config]
            readers += [lambda: open_run(URI).metrics()]
            readers += [lambda: restoring.latest(URI, str(tmp_path / "runs"), "digits")]
            for reader in readers:
                try:
                    reader()
                    problem = ""
                except MlxError as error:
                    problem = str(error)
                assert "\n" not in problem
            if file != "mirror.json":
                assert len(list_rows(URI)) == 1
        assert hostile.tree(outside) == before

    @pytest.mark.parametrize("link", ["digits", "digits/run_001"])
    def test_links_in_the_storage(self, server: Hub, tmp_path: Path, outside: Path, link: str) -> None:
        self.offered(server)
        self.linked(tmp_path / "runs" / link, outside)
        with contextlib.suppress(MlxError):  # another number is free
            run, _ = restoring.latest(URI, str(tmp_path / "runs"), "digits")
            assert run is not None
            assert run.name == "run_002"
        assert os.listdir(outside) == ["precious"]

    def linked(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True)
        link.symlink_to(target)


@pytest.mark.parametrize(
    ("token", "uri", "message"),
    [
        ("", URI, "there is no token for hf://alice/digits: set HF_TOKEN to one that may write, or"),
        ("read-alice", URI, "your token has no access to hf://alice/digits, or may only read it; set"),
        ("token-alice", "hf://alice", "'hf://alice' does not name a repository .* write hf://USER/NAME"),
    ],
)
def test_what_cannot_be_mirrored(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, uri: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    with pytest.raises(UsageError, match=message) as caught:
        Mirror(uri).claim(Training(tmp_path).folder, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (URI, "there is no repository hf://alice/digits, or your token may not read it; check the name, and set HF"),
        ("hf://alice/bert", "hf://alice/bert holds something other than a run: config.json"),
    ],
)
def test_what_cannot_be_read(server: Hub, uri: str, message: str) -> None:
    server.create("alice/bert", {"config.json": b"{}"})
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        open_run(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.kills
def test_the_hub_is_down_for_a_while(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning is printed when the Hub fails, and one line when the mirror is up to date again."""
    monkeypatch.setattr(Repository.__init__, "__defaults__", (0.2,))
    monkeypatch.setattr(mirror, "RETRY_S", 0.0)
    training = Training(tmp_path)
    following = training.follow()
    server.faults = Faults(1, ("503",), lambda method, path: "/commit/" in path)
    training.save(0)
    following.saved()
    wait_for(lambda: len(server.faults.injected) > 6)  # of two uploads
    announced, notice = following.notices()
    assert "first upload" in announced.text
    assert isinstance(notice, WarningNotice)
    begins = f"training continues without a mirror until the upload succeeds: cannot reach {server.url} for {URI}: "
    assert notice.text.startswith(begins)
    server.faults = Faults()
    wait_for(lambda: len(server.commits("alice/digits")) == 2)
    training.record.finish("SUCCEEDED")
    again, complete = following.finish(60)
    assert again.text == f"mirror    {URI} is up to date again"
    assert "is complete" in complete.text
    assert not isinstance(again, WarningNotice)


@pytest.mark.kills
def test_the_second_of_two_machines_is_refused_while_the_first_trains(
    mlx: Mlx, start: Start, experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    """If another machine takes over, the first one saves a checkpoint and stops, with its next commit."""
    one = experiment("faults")
    two = Path(shutil.copytree(one, tmp_path / "two" / "faults"))
    with Hub() as server:
        uri = "hf://alice/faults"
        command = ("train", "run", "cfg.start_workers=0", f"cfg.hub.mirror={uri}", "cfg.checkpoint_every_steps=2")
        first = start(one, *command, "cfg.num_epochs=500", "cfg.pause_s=0.1", **server.variables())
        wait_for(lambda: len(server.repositories) == 1 and len(server.commits("alice/faults")) >= 2, 240)
        refused = mlx(two, *command, "--resume=auto", **server.variables())
        begins = f"error: {uri} belongs to process {first.pid} on "
        assert (refused.returncode, refused.stderr.startswith(begins)) == (2, True), refused.stderr
        assert not (two / "runs").exists()
        with server.lock:
            elsewhere(server, age_s=0, driver="another", name="alice/faults")
        shown, errors = first.communicate(timeout=120)
        assert first.returncode == 143
        assert f"{uri} was taken over by attempt 1" in shown
        assert "mlx xp push" not in shown
        assert errors.startswith("stopped; faults run_001 is marked STOPPED and keeps its checkpoints")
        assert server.commits("alice/faults")[-1] == "elsewhere"
