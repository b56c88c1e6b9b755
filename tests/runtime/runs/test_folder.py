"""The folders of runs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_runtime import BaseModule, DataConfig, TrainConfig
from mlx_runtime.companions.jobs import contents
from mlx_runtime.companions.jobs.datajob import output_path
from mlx_runtime.config import composition
from mlx_runtime.driver import request
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.checkpoints import store
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.folder import claim_run, find_run, list_runs, named_run
from mlx_runtime.runs.queries import lookup
from mlx_runtime.storage.files import storage_at, storage_root
from mlx_runtime.storage.local import write_atomic

pytestmark = pytest.mark.pure


def test_runs_are_numbered_and_never_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: claim_run(str(tmp_path), "digits").name, range(40)))
    assert sorted(runs) == [f"run_{number:03d}" for number in range(1, 41)]
    assert sorted(path.name for path in (tmp_path / "digits" / "run_001").iterdir()) == [
        ".reserve",  # until the run ends
        "checkpoints",
    ]


def test_a_run_is_found_by_name_number_and_latest(tmp_path: Path) -> None:
    for _ in range(3):
        claim_run(str(tmp_path), "digits")
    assert find_run(str(tmp_path), "digits").name == "run_003"
    assert find_run(str(tmp_path), "digits", "2").name == find_run(str(tmp_path), "digits", "run_002").name == "run_002"
    with pytest.raises(UsageError, match=r"digits has no run '7'. Did you mean 'run_00\d'\?"):
        find_run(str(tmp_path), "digits", "7")
    with pytest.raises(UsageError, match=r"no runs of 'digit' in .*\. Did you mean 'digits'\?"):
        find_run(str(tmp_path), "digit")


@pytest.mark.process
def test_a_full_disk_is_told_at_the_start(tmp_path: Path) -> None:
    """A file size limit of 4 KiB simulates a full disk: creating works, writing fails."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from mlx_runtime.exits import clean_exit; from mlx_runtime.runs.folder import claim_run\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "with clean_exit(): claim_run(sys.argv[1], 'digits')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write runs to {tmp_path}: File too large. Choose another folder")
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "digits").iterdir()) == []


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_atomic(file, "old")
    with pytest.raises(TypeError):
        write_atomic(file, 3)  # type: ignore[arg-type]
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.s3
class TestObjectStore:
    """The same on an S3 server."""

    @pytest.fixture
    def root(self, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("MLX_CACHE", str(tmp_path))
        return s3.format(f"layout-{tmp_path.name}")

    def test_runs_are_numbered_and_never_shared(self, root: str) -> None:
        with ThreadPoolExecutor(4) as pool:
            runs = list(pool.map(lambda _: claim_run(root, "digits").name, range(8)))
        assert len(set(runs)) == 8
        assert [run.name for run in list_runs(root)] == sorted(runs)
        assert find_run(root, "digits").name == max(runs)

    def test_files_go_there_and_come_back(self, root: str, tmp_path: Path) -> None:
        run = claim_run(root, "digits")
        run.metrics.write_text("a\n")
        run.conf.write_text("b\n")
        run.push(run.metrics, run.conf)
        run.metrics.write_text("changed\n")
        run.pull("*.jsonl")
        assert (run.metrics.read_text(), run.conf.read_text()) == ("a\n", "b\n")
        storage_at(run.location).remove_file(run.metrics.name)
        run.pull("*.jsonl")
        assert not run.metrics.exists()
        log = run.path / "wandb" / "offline-run-1" / "files" / "log.txt"
        log.parent.mkdir(parents=True)
        log.touch()
        run.pull("wandb/*run-*/**/*")
        assert log.exists()


def test_the_latest_run_is_none_of_a_sweep(tmp_path: Path) -> None:
    runs = [claim_run(str(tmp_path), "digits") for _ in range(3)]
    for run in runs[1:]:
        run.record.write_text('{"status": "SUCCEEDED", "sweep": {"name": "sweep_001", "trial": 1}}')
    assert find_run(str(tmp_path), "digits") == runs[0]
    runs[0].record.write_text(runs[1].record.read_text())
    with pytest.raises(UsageError, match=r"all runs of digits belong to sweeps; name one, like digits/run_001"):
        find_run(str(tmp_path), "digits")


ODD = [
    *("a?b", "a?b=c&d", "a#b", "a b", "it's", 'say "x"', "50%", "%20", "a,b", "[x]", "{y}", "a=b", "back\\slash"),
    *("end\\", "\\'", "~", "größe", "-x", "a:b", "a;b&c", "*", "null"),
]
"""Folder names with a special meaning in a URI, a shell, YAML, Hydra or OmegaConf."""


@pytest.mark.parametrize("name", ODD)
def test_a_storage_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is in <tmp_path>/<name>/digits/run_001, and there is nothing else."""
    root = str(tmp_path / name)
    folder = claim_run(root, "digits")
    assert folder.path == tmp_path / name / "digits" / "run_001"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (folder.root, folder.title) == (root, "digits/run_001")
    folder.record.write_text("{}")
    assert named_run(folder.location, "", "") == folder
    assert [found.path for found in list_runs(root)] == [folder.path]
    assert contents.path_in(root, folder.location).parts == ("digits", "run_001")
    store.CheckpointStore(folder.checkpoints).save({}, CheckpointInfo(0, True, 1, {}))
    with pytest.raises(ConfigError, match="was not saved by this version"):
        store.read(f"{folder.checkpoints}/epoch_0001")
    conf = tmp_path / "conf.yaml"
    conf.write_text("cfg: {storage_path: runs, name: x}\n")
    for written in (root, name):
        monkeypatch.setenv("MLX_STORAGE", written)
        assert composition.read(conf, []).tree["cfg"]["storage_path"] == written
        monkeypatch.delenv("MLX_STORAGE")
        assert composition.read(conf, [composition.storage_override(written)]).tree["cfg"]["storage_path"] == written


def test_functions_train_in_the_folder_runs_without_a_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert lookup.storage_root() == str(tmp_path / "runs")


class Plain(BaseModule):
    cfg: TrainConfig


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_a_storage_without_a_name_is_refused(empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would mean the working directory. An empty variable counts as unset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_STORAGE", empty)
    with pytest.raises(UsageError, match="which storage"):
        lookup.storage_root()
    conf = tmp_path / "conf.yaml"
    conf.write_text("cfg: {storage_path: runs, name: x}\n")
    assert composition.read(conf, []).tree["cfg"]["storage_path"] == "runs"
    with pytest.raises(ConfigError, match=r"cfg.storage_path is empty"):
        storage_root(empty)
    with pytest.raises(ConfigError, match=r"cfg.storage_path is empty"):
        request.load_config(Plain, [composition.storage_override(empty)], conf)
    assert list(tmp_path.iterdir()) == [conf]


@pytest.mark.parametrize("name", ["a\x1b[2J", " a", "", ".a", "a/b", "a?b", "\ud800"])
def test_what_cannot_name_an_experiment_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cfg\.name is .*, which is not a valid folder name") as error:
        claim_run(str(tmp_path), name)
    assert "\n" not in str(error.value)
    if name and "/" not in name:
        with pytest.raises(ConfigError, match=r"cfg\.path is .*; it must be a folder below the storage"):
            output_path(DataConfig(name=name))
    assert list(tmp_path.iterdir()) == []
