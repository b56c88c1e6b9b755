"""Storages in a folder and on an S3 server."""

from pathlib import Path

import pytest

from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import claim_run
from mlx_runtime.storage.files import Storage, storage_at

pytestmark = pytest.mark.pure


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return storage_at(request.getfixturevalue("s3").format(f"files-{tmp_path.name}"))
    (tmp_path / "storage").mkdir()
    return storage_at(str(tmp_path / "storage"))


def test_a_file_is_written_read_moved_and_removed(storage: Storage, tmp_path: Path) -> None:
    assert storage.claim_folder("a")
    assert not storage.claim_folder("a")
    (tmp_path / "x").write_bytes(b"uploaded")
    storage.upload(tmp_path / "x", "a", "up")
    storage.write(b"12", "a", "n")
    with storage.create("a", "c") as file:
        file.write(b"345")
    assert {*storage.names("a")} >= {"c", "n", "up"}
    assert (storage.size_bytes("a", "c"), storage.size_bytes("a", "none"), storage.size_bytes("a")) == (3, None, None)
    storage.move("a", "b")
    storage.download(tmp_path / "y" / "z", "b", "up")
    assert (tmp_path / "y" / "z").read_bytes() == b"uploaded"
    with storage.open("b", "c") as file:
        file.seek(1)
        assert file.read() == b"45"
    for _ in range(2):
        storage.remove_file("b", "c")
    with pytest.raises(FileNotFoundError):
        storage.read("b", "c")
    assert {"n", "up"} <= {item.name for item in storage.below()}
    for _ in range(2):
        storage.remove_folder("b")
    assert (storage.names("b"), storage.listed("b"), storage.below()) == ([], [], [])


def test_a_file_is_created_once(storage: Storage) -> None:
    assert storage.exclusive
    assert storage.create_exclusively(b"first", "x")
    assert not storage.create_exclusively(b"second", "x")
    assert storage.read("x") == b"first"


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_named(s3: str) -> None:
    storage = storage_at(s3.format("runs").replace("://bucket/", "://lab-bucket/"))
    message = "the bucket lab-bucket does not exist; create it, or name another, like s3://BUCKET/runs"
    with pytest.raises(FileNotFoundError, match=message):
        storage.names()
    with pytest.raises(FileNotFoundError, match=message):
        storage.write(b"", "digits", "mark")
    with pytest.raises(
        StorageError, match=rf"cannot write runs to .*: {message}\. Choose another folder with cfg.storage_path"
    ):
        claim_run(storage.root, "digits")
    assert storage_at(s3.format("none")).names() == []  # a folder that does not exist is empty


@pytest.mark.parametrize("option", ["endpoint", "endpoint_url"])
def test_an_unknown_option_of_a_uri_is_answered_with_a_known_one(option: str) -> None:
    with pytest.raises(StorageError, match=rf"S3 has no option {option}\. Did you mean 'endpoint_override'\?"):
        storage_at(f"s3://bucket/runs?{option}=127.0.0.1:9000")


@pytest.mark.process
def test_a_store_without_credentials_names_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    storage = storage_at("s3://bucket/a?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1")
    with pytest.raises(OSError, match="Unable to locate credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        storage.create_exclusively(b"", "mark")
