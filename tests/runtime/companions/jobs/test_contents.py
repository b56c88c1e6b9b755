"""`mlx data show` and `rm`: the content of the storage, and safe removal.

Uses real folders with links and permissions, and a real S3 server.

<storage>/
    data/digits/          a.bin 3,000 bytes, b.bin 1,000, deep/er/c.bin 500, deep/er/d.bin 500
    digits/run_001/       run.json
    link -> <elsewhere>   outside the storage
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx
from storages import SIZES, files, put

from mlx_runtime.companions.jobs.contents import path_in, refuse_in_use, survey
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import run_folder
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.files import join_path, to_json

pytestmark = pytest.mark.pure


# -- show --


def test_the_tree_for_people(root: str) -> None:
    put(root, {"data/digits/deep/er/e.bin": b"x"})
    assert survey(path_in(root, "data"), depth=2).lines() == [
        "data           5.0 kB  5 files",
        "└── digits     5.0 kB  5 files",
        "    ├── a.bin  3.0 kB",
        "    ├── deep   1.0 kB  3 files",
        "    └── b.bin  1.0 kB",
    ]


def test_a_link_to_a_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_bytes(b"x" * 10_000)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "round").symlink_to(folder)
    assert survey(path_in(str(folder), ""), depth=1).size_bytes == 5000


@pytest.mark.process
def test_show_by_command(root: str, mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(tmp_path, "data", "show", "--json", "--depth", "0", "data/digits", MLX_STORAGE=root)
    assert json.loads(done.stdout) == {"name": "digits", "kind": "folder", "size_bytes": 5000, "files": 4}
    done = mlx(tmp_path, "data", "show", "data/digitz", MLX_STORAGE=root)
    where = join_path(root, "data", "digitz")
    assert (done.returncode, done.stderr) == (2, f"error: there is no {where}; mlx data show lists the storage\n")
    done = mlx(tmp_path, "data", "show")
    assert done.returncode == 2
    assert done.stderr == "error: which storage? Change to the folder of an experiment, or set MLX_STORAGE=FOLDER\n"


@pytest.mark.process
def test_a_storage_that_only_a_cluster_has_asks_for_it(mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(tmp_path, "data", "show", MLX_STORAGE="/nowhere/shared")
    assert done.returncode == 2
    assert done.stderr == (
        "error: /nowhere/shared does not exist on this machine; on a cluster: mlx --on http://HEAD:8265 data show\n"
    )


# -- rm --


@pytest.mark.parametrize("path", ["data/../../victim", "/victim", "link/inside"])
def test_what_lies_outside_is_refused(folder: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"lies outside the storage .*; MLX_STORAGE=FOLDER selects another storage"):
        path_in(str(folder), str(tmp_path / "victim") if path == "/victim" else path)


@pytest.mark.s3
@pytest.mark.parametrize("path", ["data/../../victim", "s3://other/victim"])
def test_what_lies_outside_is_refused_on_s3(s3: str, tmp_path: Path, path: str) -> None:
    root = s3.format(tmp_path.name)
    put(root, {"a": b"x"})
    with pytest.raises(UsageError, match="lies outside the storage"):
        path_in(root, path)


@pytest.mark.parametrize("path", ["", "data/.."])
def test_the_storage_itself_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(UsageError, match="is the storage itself; name a folder in it"):
        refuse_in_use(path_in(str(folder), path))


@pytest.mark.process
def test_of_a_link_only_the_link_goes(folder: Path, tmp_path: Path, mlx: Mlx) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("precious", "job.json"):
        (tmp_path / "elsewhere" / name).write_text("{}")
    (folder / "data" / "digits" / "out").symlink_to(tmp_path / "elsewhere")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder / "loop")
    assert mlx(folder, "data", "show", MLX_STORAGE=str(folder)).returncode == 0
    (folder / "loop").unlink()
    for path in ("link", "data/digits"):
        assert mlx(folder, "data", "rm", "-y", path, MLX_STORAGE=str(folder)).returncode == 0
    assert files(str(tmp_path / "elsewhere")) == ["job.json", "precious"]
    assert sorted(path.name for path in folder.rglob("*")) == ["data"]


def test_runs_are_not_data(root: str) -> None:
    put(root, {"digits/run_001/run.json": b"{}", "digits/run_001/checkpoints/epoch_0001/state.pt": b"x"})
    run_folder(root, "claimed", "run_001").path.mkdir(parents=True, exist_ok=True)
    run_folder(root, "claimed", "run_001").claim_attempt(1)
    for path in ("digits", "digits/run_001", "digits/run_001/checkpoints", "claimed"):
        with pytest.raises(UsageError, match=r"run_001.* is a run; remove it with: mlx xp rm "):
            refuse_in_use(path_in(root, path))


def test_what_is_being_filled_is_refused(root: str) -> None:
    record: dict[str, Any] = {"status": "RUNNING", "heartbeat": documents.now()} | leases.this_process()
    put(root, {"data/made/job.json": to_json(record).encode(), "data/made/a/b": b"x"})
    for path in ("data", "data/made", "data/made/a"):
        with pytest.raises(UsageError, match=r"data/made.* is being filled by process \d+"):
            refuse_in_use(path_in(root, path))
    put(root, {"data/made/job.json": to_json(record | {"status": "FAILED"}).encode()})
    refuse_in_use(path_in(root, "data/made"))


def test_what_is_being_read_is_refused(root: str) -> None:
    put(root, {".prepared/Rows-1/0.npy": b"x", ".prepared/Rows-1/last_used": b""})
    for path in (".prepared", ".prepared/Rows-1"):
        with pytest.raises(UsageError, match=r"Rows-1.* is in use, or was in the last five minutes"):
            refuse_in_use(path_in(root, path))


@pytest.mark.process
def test_it_asks_and_takes_no_for_an_answer(folder: Path, mlx: Mlx) -> None:
    done = mlx(folder, "data", "rm", "data/digits", MLX_STORAGE=str(folder))
    assert done.returncode == 1
    assert done.stdout == f"remove {folder}/data/digits, 4 files, 5.0 kB? [y/N]: \n"
    assert files(str(folder)) == sorted(SIZES)


@pytest.mark.process
def test_removed_by_command(root: str, mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(tmp_path, "data", "rm", "--yes", "data/digits", MLX_STORAGE=root)
    where = join_path(root, "data", "digits")
    assert (done.returncode, done.stdout) == (0, f"removed {where}, 4 files, 5.0 kB\n"), done.stderr
    assert files(root) == []


@pytest.mark.process
def test_half_a_removal_is_told_and_does_not_look_whole(folder: Path, mlx: Mlx) -> None:
    put(str(folder), {"data/digits/job.json": b"{}"})
    stuck = folder / "data" / "digits" / "deep" / "er" / "c.bin"
    if subprocess.run(["chattr", "+i", str(stuck)], capture_output=True).returncode:
        pytest.skip("no file attributes here")
    try:
        done = mlx(folder, "data", "rm", "-y", "data/digits", MLX_STORAGE=str(folder))
    finally:
        subprocess.run(["chattr", "-i", str(stuck)], capture_output=True)
    assert (done.returncode, done.stderr.split(": ")[1]) == (1, f"{folder}/data/digits was removed only in part")
    assert files(str(folder)) == ["data/digits/deep/er/c.bin"]
