"""Prepared datasets in a folder and on a real S3 server: complete or absent, and never removed while in use.

Rows-1/
    manifest.json
    1a2b3c-0.npy
    1a2b3c-1.npy
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from mlx_runtime.companions.prepared.columns import column_writer, load_columns
from mlx_runtime.companions.prepared.store import Manifest, Store
from mlx_runtime.storage.files import Stored

pytestmark = pytest.mark.pure

BLOCK = {"x": torch.arange(12.0).reshape(6, 2), "label": torch.arange(6)}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(str(tmp_path / "prepared"))
    return Store(request.getfixturevalue("s3").format(f"{tmp_path.name}/prepared"))


NAME = "Rows-0123456789ab-0123456789ab"


def described(name: str, rows: int) -> Manifest:
    return Manifest(name, rows, 0, {}, "src.Rows", {"path": "a"}, "")


def written(store: Store, name: str = NAME, block: dict[str, torch.Tensor] = BLOCK, times: int = 2) -> Manifest:
    rows = times * len(next(iter(block.values())))
    with store.attempt(name) as attempt, column_writer(store, described(name, rows), block, attempt) as writer:
        for _ in range(times):
            writer.write(block)
        return writer.commit()


def read(store: Store, manifest: Manifest, cache: Path) -> dict[str, torch.Tensor]:
    return load_columns(store, manifest, cache, max_bytes=1e9)


def test_what_was_written_is_found_and_read(store: Store, tmp_path: Path) -> None:
    manifest = written(store)
    assert store.find(NAME) == manifest
    assert (manifest.rows, manifest.size_bytes) == (12, 2 * 6 * (2 * 4 + 8) + 2 * 128)
    columns = read(store, manifest, tmp_path / "cache")
    assert {key: column.tolist() for key, column in columns.items()} == {
        key: torch.cat([column, column]).tolist() for key, column in BLOCK.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_every_type_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    column = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    store = Store(str(tmp_path))
    found = read(store, written(store, block={"x": column}, times=1), tmp_path)["x"]
    assert found.dtype == dtype
    assert found.tolist() == column.tolist()


def test_a_set_that_was_not_finished_does_not_exist(store: Store) -> None:
    def interrupted() -> None:
        with (
            store.attempt(NAME) as attempt,
            column_writer(store, described(NAME, 12), BLOCK, attempt) as writer,
        ):
            writer.write(BLOCK)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.find(NAME) is None
    assert store.entries() == []


def test_of_two_writers_the_first_wins_and_the_other_leaves_nothing(store: Store, tmp_path: Path) -> None:
    with store.attempt(NAME) as attempt, column_writer(store, described(NAME, 6), BLOCK, attempt) as slow:
        slow.write(BLOCK)
        fast = written(store)
        assert slow.commit() == fast
    files = {file for file, _, _ in fast.columns.values()}
    assert {*store.storage.names(NAME)} == {*files, "manifest.json", "last_used"}
    assert len(read(store, fast, tmp_path)["x"]) == 12


def age(store: Store, name: str, days: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a dataset be as old as that."""
    listed = store.storage.listed

    def aged(*parts: str, **options: bool) -> list[Stored]:
        old = days * 86_400 if parts == (name,) else 0
        found = listed(*parts, **options)
        return [Stored(item.path, item.size_bytes, item.modified_s - old, item.is_file) for item in found]

    monkeypatch.setattr(store.storage, "listed", aged)


def test_a_set_in_use_stays_and_another_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written(store)
    with store.mark_used(NAME):
        assert store.clean(0) == []
        assert store.find(NAME)
    age(store, NAME, 0.1, monkeypatch)
    assert [item.name for item in store.clean(0)] == [NAME]
    assert store.entries() == []


def test_the_least_recently_used_sets_are_removed_until_the_rest_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    for name, days in ((f"{NAME[:-1]}0", 40), (f"{NAME[:-1]}1", 50), (f"{NAME[:-1]}2", 1)):
        written(store, name)
        age(store, name, days, monkeypatch)
    size = store.entries()[0].size_bytes
    assert [item.name[-1] for item in store.entries()] == ["1", "0", "2"]
    assert store.clean(3 * size) == []
    assert [item.name[-1] for item in store.clean(1.5 * size)] == ["1", "0"]
    assert [item.name[-1] for item in store.entries()] == ["2"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    """`cfg.preparation.path` may name a folder in which a user has files, also with names like ours."""
    store = Store(str(tmp_path))
    written(store)
    killed = f"{NAME[:-1]}0"
    with store.attempt(killed):
        shutil.copytree(tmp_path / killed, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / killed)
    others = [
        tmp_path / file for file in ("photos/1.png", "photos/0a-0b.npy", "Rows-1/manifest.json", f"{NAME}/notes.txt")
    ]
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    for file in tmp_path.rglob("*"):
        os.utime(file, (0, 0))
    assert {item.name for item in store.clean(0)} == {NAME, killed}
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == sorted(others)


@pytest.mark.s3
def test_a_copy_on_this_machine_is_fetched_once_and_again_when_the_set_was_made_anew(s3: str, tmp_path: Path) -> None:
    store, cache = Store(s3.format("copies")), tmp_path / "cache"
    manifest = written(store)
    read(store, manifest, cache)
    copied = cache / NAME / manifest.columns["x"][0]
    before = copied.stat().st_mtime_ns
    read(store, manifest, cache)
    assert copied.stat().st_mtime_ns == before
    store.storage.remove_folder(NAME)
    again = written(store, block={"x": BLOCK["x"] + 1, "label": BLOCK["label"]})
    assert read(store, again, cache)["x"][0].tolist() == [1.0, 2.0]
    assert sorted(path.name for path in cache.iterdir() if not path.name.startswith(".")) == [NAME]
