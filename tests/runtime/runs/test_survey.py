"""`mlx data show` and `rm`: the content of the storage, and safe removal.

Uses real folders with links and permissions, and a real S3 server.

<storage>/
    data/digits/          a.bin 3,000 bytes, b.bin 1,000, deep/er/c.bin 500, deep/er/d.bin 500
    digits/run_001/       run.json
    link -> <elsewhere>   outside the storage
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx
from storages import SIZES, files, filled, put

from mlx_runtime.cli.verbs import data
from mlx_runtime.companions.stores.object_store import ObjectStore
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.folder import run_folder
from mlx_runtime.runs.outputs import removal
from mlx_runtime.runs.outputs.removal import refuse_in_use, remove
from mlx_runtime.runs.outputs.usage import survey
from mlx_runtime.runs.queries.lookup import StoragePath
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.files import join_path, storage_at, to_json

pytestmark = pytest.mark.pure


def run_record(root: str, name: str, **fields: Any) -> None:
    """Create a run whose driver is this process, unless the fields say otherwise."""
    record = {"status": "RUNNING", "heartbeat": documents.now()} | leases.this_process() | fields
    put(root, {f"{name}/run.json": to_json(record).encode()})


# -- show --


def test_the_tree_has_the_sizes_of_all_that_is_below(root: str) -> None:
    found = survey(StoragePath.parse(root, None), depth=3, limit=20)
    assert found.top.as_json() == {
        "name": root,
        "kind": "folder",
        "size_bytes": 5000,
        "files": 4,
        "children": [
            {
                "name": "data",
                "kind": "folder",
                "size_bytes": 5000,
                "files": 4,
                "children": [
                    {
                        "name": "digits",
                        "kind": "folder",
                        "size_bytes": 5000,
                        "files": 4,
                        "children": [
                            {"name": "a.bin", "kind": "file", "size_bytes": 3000},
                            {"name": "b.bin", "kind": "file", "size_bytes": 1000},
                            {"name": "deep", "kind": "folder", "size_bytes": 1000, "files": 2},
                        ],
                    }
                ],
            }
        ],
    }


def test_what_is_deeper_counts_and_is_not_listed(root: str) -> None:
    for depth in range(6):
        found = survey(StoragePath.parse(root, "data/digits"), depth=depth, limit=0)
        assert (found.top.size_bytes, found.top.files) == (5000, 4)
        assert len(found.lines()) == {0: 1, 1: 4, 2: 5}.get(depth, 7)


def test_the_tree_for_people(root: str) -> None:
    put(root, {"data/digits/deep/er/e.bin": b"x"})
    assert survey(StoragePath.parse(root, "data"), depth=2, limit=1).lines() == [
        "data              5.0 kB  5 files",
        "└── digits        5.0 kB  5 files",
        "    ├── a.bin     3.0 kB",
        "    └── … 2 more  2.0 kB",
    ]
    assert survey(StoragePath.parse(root, "data/digits"), depth=1, limit=2).lines() == [
        "digits     5.0 kB  5 files",
        "├── a.bin  3.0 kB",
        "├── deep   1.0 kB  3 files",
        "└── b.bin  1.0 kB",
    ]


def test_many_entries_are_counted_not_listed(root: str) -> None:
    put(root, {f"many/{number:04d}": b"x" * number for number in range(50)})
    lines = survey(StoragePath.parse(root, "many"), depth=1, limit=3).lines()
    assert [line.split()[:2] for line in lines[1:4]] == [["├──", "0049"], ["├──", "0048"], ["├──", "0047"]]
    assert lines[4].split() == ["└──", "…", "47", "more", "1.1", "kB"]  # 0 + … + 46 = 1081
    assert len(survey(StoragePath.parse(root, "many"), depth=1, limit=0).lines()) == 51
    # with 49, the last entry rather than `1 more`
    assert len(survey(StoragePath.parse(root, "many"), depth=1, limit=49).lines()) == 51


def test_a_link_is_named_and_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_bytes(b"x" * 10_000)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "round").symlink_to(folder)
    found = survey(StoragePath.parse(str(folder), None), depth=1, limit=0)
    assert found.top.size_bytes == 5000
    assert {child.name: child.kind for child in found.top.children or []} == {
        "data": "folder",
        "link": "link",
        "round": "link",
    }


def test_30_000_files_are_counted(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}").mkdir()
        for name in range(1000):
            (tmp_path / f"{number}" / f"{name}").touch()
    found = survey(StoragePath.parse(str(tmp_path), None), depth=2, limit=20)
    assert found.top.files == 30_000
    assert len(found.lines()) == 1 + 20 + 20 * 21 + 1


@pytest.mark.process
def test_a_folder_that_cannot_be_read_is_told_by_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without permissions: root drops its privileges temporarily."""
    from click.testing import CliRunner

    import mlx_runtime.cli.data  # noqa: F401 - while this process may read it
    from mlx_runtime.cli import mlx

    nobody, before = 65534, os.geteuid()
    with tempfile.TemporaryDirectory() as root:  # pytest's own folders are private
        Path(root).chmod(0o755)
        secret = Path(root, "data", "secret")
        secret.mkdir(parents=True)
        secret.chmod(0)
        monkeypatch.setenv("MLX_STORAGE", root)
        try:
            if before == 0:
                os.seteuid(nobody)
            done = CliRunner().invoke(mlx, ["data", "show"])
        finally:
            os.seteuid(before)
    assert done.exit_code == 1
    assert "error: the sizes exclude unreadable files and folders: data/secret\n" in done.output


@pytest.mark.process
def test_show_by_command(root: str, mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(tmp_path, "data", "show", "--json", "--depth", "0", "data/digits", MLX_STORAGE=root)
    assert json.loads(done.stdout) == {"name": "digits", "kind": "folder", "size_bytes": 5000, "files": 4}
    done = mlx(tmp_path, "data", "show", "data/digitz", MLX_STORAGE=root)
    where = join_path(root, "data", "digitz")
    assert (done.returncode, done.stderr) == (2, f"error: there is no {where}. Did you mean 'digits'?\n")
    done = mlx(tmp_path, "data", "show")
    assert done.returncode == 2
    assert done.stderr == "error: which storage? Change to the folder of an experiment, or set MLX_STORAGE=FOLDER\n"


@pytest.mark.process
def test_a_storage_that_only_a_cluster_has_asks_for_it(mlx: Mlx, tmp_path: Path) -> None:
    done = mlx(tmp_path, "data", "show", MLX_STORAGE="/nowhere/shared")
    assert done.returncode == 2
    assert done.stderr == (
        "error: /nowhere/shared does not exist on this machine; if only a cluster has it, pass "
        "--ray-address http://HEAD:8265\n"
    )


# -- rm --


def test_a_folder_goes_with_all_that_is_in_it(root: str) -> None:
    put(root, {"data/other/e.bin": b"x"})
    remove(StoragePath.parse(root, "data/digits"))
    assert files(root) == ["data/other/e.bin"]
    assert storage_at(root).names("data") == ["other"]


def test_a_file_goes_alone(root: str) -> None:
    remove(StoragePath.parse(root, "data/digits/a.bin"))
    assert files(root) == ["data/digits/b.bin", "data/digits/deep/er/c.bin", "data/digits/deep/er/d.bin"]


@pytest.mark.parametrize(
    "path", ["../victim", "data/../../victim", "/victim", "link/inside", "link/../victim", "~/victim"]
)
def test_what_lies_outside_is_refused(folder: Path, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "victim").mkdir()
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"lies outside the storage .*; MLX_STORAGE=FOLDER selects another storage"):
        StoragePath.parse(str(folder), str(tmp_path / "victim") if path == "/victim" else path)


@pytest.mark.s3
@pytest.mark.parametrize(
    "path", ["../victim", "data/../../victim", "/victim", "s3://other/victim", "s3://bucket/victim"]
)
def test_what_lies_outside_is_refused_on_s3(s3: str, tmp_path: Path, path: str) -> None:
    root = s3.format(tmp_path.name)
    put(root, {"a": b"x"})
    with pytest.raises(UsageError, match="lies outside the storage"):
        StoragePath.parse(root, path)


@pytest.mark.parametrize("path", ["", ".", "data/..", "/"])
def test_the_storage_itself_is_refused(folder: Path, path: str) -> None:
    place = StoragePath.parse(str(folder), str(folder) if path == "/" else path)
    with pytest.raises(UsageError, match="is the storage itself; name a folder in it"):
        refuse_in_use(place, survey(place, 0, 0))


def test_paths_that_lead_into_the_storage_are_understood(root: str) -> None:
    for path in ("data/digits", "data/./digits/", join_path(root, "data", "digits")):
        assert StoragePath.parse(root, path).parts == ("data", "digits")


def test_paths_over_links_inside_are_understood(folder: Path, tmp_path: Path) -> None:
    (folder / "shortcut").symlink_to(folder / "data")
    (tmp_path / "alias").symlink_to(folder)
    assert StoragePath.parse(str(folder), "shortcut/digits").parts == ("data", "digits")
    assert StoragePath.parse(str(folder), "data/digits/../digits").parts == ("data", "digits")
    assert StoragePath.parse(str(folder), str(tmp_path / "alias" / "data")).parts == ("data",)
    assert StoragePath.parse(str(tmp_path / "alias"), "data").parts == ("data",)


@pytest.mark.process
def test_of_a_link_only_the_link_goes(folder: Path, tmp_path: Path, mlx: Mlx) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (folder / "data" / "digits" / "out").symlink_to(tmp_path / "elsewhere")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    done = mlx(folder, "data", "rm", "-y", "link", MLX_STORAGE=str(folder))
    assert (done.returncode, done.stdout) == (0, f"removed {folder}/link, a link; its target stays\n")
    done = mlx(folder, "data", "rm", "-y", "data/digits", MLX_STORAGE=str(folder))
    assert done.returncode == 0
    assert (tmp_path / "elsewhere" / "precious").read_text() == "x"
    assert not (folder / "data" / "digits").exists()


def test_runs_are_not_data(root: str) -> None:
    run_record(root, "digits/run_001", status="SUCCEEDED")
    put(root, {"digits/run_001/checkpoints/epoch_0001/state.pt": b"x"})
    for path in ("digits", "digits/run_001", "digits/run_001/checkpoints"):
        place = StoragePath.parse(root, path)
        with pytest.raises(UsageError, match=r"is a run; remove it with: mlx xp rm digits run_001"):
            refuse_in_use(place, survey(place, 0, 0))


def test_a_living_run_is_refused_by_name(root: str) -> None:
    run_record(root, "digits/run_001")
    for path in ("digits", "digits/run_001"):
        place = StoragePath.parse(root, path)
        with pytest.raises(UsageError, match=r"digits run_001 is being trained by process \d+ on .*mlx xp stop digits"):
            refuse_in_use(place, survey(place, 0, 0))


def test_a_run_that_was_only_claimed_is_refused(root: str) -> None:
    folder = run_folder(root, "digits", "run_001")
    if folder.uri is None:
        folder.path.mkdir(parents=True)
    folder.claim_attempt(1)
    place = StoragePath.parse(root, "digits")
    with pytest.raises(UsageError, match="is a run"):
        refuse_in_use(place, survey(place, 0, 0))


def test_what_is_left_of_a_run_that_was_removed_may_go(folder: Path) -> None:
    run_record(str(folder), "digits/.run_001.removing-0123", status="SUCCEEDED")
    for path in ("digits/.run_001.removing-0123", "digits"):
        place = StoragePath.parse(str(folder), path)
        refuse_in_use(place, survey(place, 0, 0))


def test_what_is_being_read_is_refused(root: str) -> None:
    put(root, {".prepared/Rows-1/0.npy": b"x", ".prepared/Rows-1/used-0123": b""})
    for path in (".prepared", ".prepared/Rows-1"):
        place = StoragePath.parse(root, path)
        with pytest.raises(UsageError, match=r"Rows-1.* is being read"):
            refuse_in_use(place, survey(place, 0, 0))


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


# -- rm, and changes while it asks --


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside any storage, with the same names inside."""
    filled(str(tmp_path / "outside"))
    return tmp_path / "outside"


def swap(folder: Path, target: Path) -> None:
    """Replace a folder by a link, and move the folder away."""
    folder.rename(target.with_name("moved"))
    folder.symlink_to(target)


@pytest.mark.parametrize("swapped", ["data", "data/digits", "data/digits/deep"])
def test_a_folder_that_becomes_a_link_leads_nowhere(
    folder: Path, outside: Path, swapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(folder))
    place, found = data.plan_removal("data/digits")
    swap(folder / swapped, outside / swapped)
    with pytest.raises(UsageError, match=r"lies outside the storage|has changed since it was measured; nothing was"):
        data.remove(place, found)
    assert {*SIZES} < {*files(str(outside))}


@pytest.mark.parametrize("swapped", ["data", "data/digits", "data/digits/deep"])
def test_not_even_after_it_was_checked(folder: Path, outside: Path, swapped: str) -> None:
    """There is an instant between the last check and the removal."""
    place = StoragePath.parse(str(folder), "data/digits")
    swap(folder / swapped, outside / swapped)
    if swapped == "data":
        with pytest.raises(StorageError, match="nothing was removed"):
            remove(place)
    else:
        remove(place)  # the link is removed, its target stays
        assert not os.path.lexists(folder / "data/digits")
    assert {*SIZES} < {*files(str(outside))}


@pytest.mark.parametrize("changed", ["data/digits/new.bin", "data/digits/a.bin"])
def test_what_has_changed_is_looked_at_again(folder: Path, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(folder))
    place, found = data.plan_removal("data/digits")
    (folder / changed).write_text("more")
    with pytest.raises(UsageError, match="nothing was removed. See: mlx data show data/digits"):
        data.remove(place, found)
    assert {*SIZES} <= {*files(str(folder))}


def test_a_run_that_begins_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(folder))
    place, found = data.plan_removal("data")
    run_record(str(folder), "data/run_001")
    with pytest.raises(UsageError, match="run_001 is being trained by"):
        data.remove(place, found)
    assert {*SIZES} < {*files(str(folder))}


@pytest.mark.process
def test_unclear_requests_are_refused(folder: Path, mlx: Mlx) -> None:
    done = mlx(folder, "data", "rm", MLX_STORAGE=str(folder))
    message = "error: remove what? A part of the storage: mlx data rm PATH; prepared datasets: add --prepared\n"
    assert (done.returncode, done.stderr) == (2, message)
    done = mlx(folder, "data", "rm", "-y", "data", "--prepared", MLX_STORAGE=str(folder))
    assert (done.returncode, done.stderr) == (
        2,
        "error: a PATH and the options of --prepared contradict each other; pass one of them\n",
    )
    assert files(str(folder)) == sorted(SIZES)


def unremovable(folder: Path) -> Callable[[bool], None]:
    """A folder that not even root can empty, by a file system attribute; skips if there is none."""

    def hold(held: bool) -> None:
        done = subprocess.run(["chattr", "+i" if held else "-i", str(folder)], capture_output=True)
        if held and done.returncode:
            pytest.skip("no file attributes here")

    return hold


@pytest.mark.process
def test_half_a_removal_is_told_and_seen(folder: Path, mlx: Mlx) -> None:
    hold = unremovable(folder / "data" / "digits" / "deep" / "er" / "c.bin")
    hold(True)
    try:
        done = mlx(folder, "data", "rm", "-y", "data/digits", MLX_STORAGE=str(folder))
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: only a part of {folder}/data/digits was removed (")
        assert "): 1 files, 500 bytes, are left. " in done.stderr
        left = next((folder / "data").iterdir())
        assert left.name.startswith(".digits.removing-")  # nobody takes it for the whole
        assert done.stderr.endswith(f"Make them removable, then: mlx data rm data/{left.name}\n")
        shown = mlx(folder, "data", "show", MLX_STORAGE=str(folder)).stdout
        assert "(partly removed; remove it again)" in shown
    finally:
        subprocess.run(["chattr", "-i", "-R", str(folder)], capture_output=True)
    assert mlx(folder, "data", "rm", "-y", f"data/{left.name}", MLX_STORAGE=str(folder)).returncode == 0
    assert list((folder / "data").iterdir()) == []


class Refusing:
    """An S3 file system that loses its connection after some deletions."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def delete_dir(self, path: str) -> None:
        self._fs.delete_file(f"{path}/a.bin")
        raise OSError("connection lost")


@pytest.mark.s3
def test_half_a_removal_is_told_on_s3(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = s3.format(tmp_path.name)
    put(root, {name: b"x" * size for name, size in SIZES.items()} | {"data/digits/job.json": b"{}"})

    class Losing(ObjectStore):
        def __init__(self, root: str) -> None:
            super().__init__(root)
            self._fs = Refusing(self._fs)

    place = StoragePath.parse(root, "data/digits")
    with monkeypatch.context() as patch:
        patch.setattr(removal, "storage_at", Losing)
        with pytest.raises(
            StorageError, match=r"only a part of .* was removed \(connection lost\): 3 files, 2.0 kB, are left"
        ):
            remove(place)
    assert "data/digits/job.json" not in files(root)  # nobody takes it for the whole
    remove(place)
    assert files(root) == []
