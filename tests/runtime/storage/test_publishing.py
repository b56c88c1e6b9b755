"""Folders are published whole or not at all, even if a process is killed between two file system operations.

<root>/
    data/              a.bin, marker.json
    .data.part-…       only while something is published
    .data.old-…
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.storage.files import LocalStorage, Storage
from mlx_runtime.storage.publishing import Publication, recover, unpublish

pytestmark = pytest.mark.pure

MARKER = "marker.json"


class Killed(BaseException):
    """Simulates SIGKILL: nothing that the process does afterwards reaches the disk."""


class Killer:
    """Allows a number of operations and refuses all later ones."""

    def __init__(self) -> None:
        self.allowed: int | None = None

    def count(self) -> None:
        if self.allowed is not None:
            if self.allowed == 0:
                raise Killed
            self.allowed -= 1

    @contextlib.contextmanager
    def after(self, operations: int) -> Iterator[None]:
        self.allowed = operations
        try:
            with contextlib.suppress(Killed):
                yield
        finally:
            self.survived = self.allowed > 0
            self.allowed = None


KILLER = Killer()

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if KILLER.allowed is not None and (event in CHANGES or (event == "open" and "w" in str(arguments[1]))):
        KILLER.count()


sys.addaudithook(audit)


class NoRenames(LocalStorage):
    """A folder that behaves like an object store: no renames, and folders appear with their files."""

    local = False

    def create(self, *parts: str) -> Any:
        Path(self.of(*parts)).parent.mkdir(parents=True, exist_ok=True)
        return super().create(*parts)

    def move(self, old: str, new: str) -> None:
        raise NotImplementedError


@pytest.fixture(params=[LocalStorage, NoRenames])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return request.param(str(tmp_path))


def publish(storage: Storage, content: bytes) -> None:
    with Publication(storage, "data", MARKER) as publication:
        name = publication.unique("a.bin")
        with publication.create(name) as file:
            file.write(content)
        publication.commit(name.encode())
        publication.remove_others()


def published(storage: Storage) -> bytes | None:
    """Return the content that a reader finds: the marker names the file."""
    try:
        name = storage.read("data", MARKER).decode()
    except FileNotFoundError:
        return None
    return storage.read("data", name)


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_kill_between_any_two_operations_leaves_the_old_or_the_new(storage: Storage, before: bytes | None) -> None:
    outcomes = set()
    for operations in range(100):
        if before is not None:
            publish(storage, before)
        elif storage.names("data"):
            unpublish(storage, "data", MARKER)
        with KILLER.after(operations):
            publish(storage, b"new")
        again = type(storage)(storage.root)
        if again.local:
            recover(again)
        outcomes.add(published(again))
        assert outcomes <= {before, b"new"}
        assert [name for name in again.names() if name.startswith(".")] == []
        if KILLER.survived:
            break
    else:
        pytest.fail("it never got to the end")
    assert outcomes == {before, b"new"}
    assert operations > 4
    publish(storage, b"next")  # removes leftovers of the kills in an object store
    assert published(storage) == b"next"
    assert len([name for name in storage.names("data") if not name.startswith(".")]) == 2


def test_a_kill_while_a_folder_is_removed_leaves_all_or_nothing(storage: Storage) -> None:
    for operations in range(100):
        publish(storage, b"old")
        with KILLER.after(operations):
            unpublish(storage, "data", MARKER)
        assert published(storage) in (b"old", None)
        recover(storage)
        assert published(storage) in (b"old", None)
        assert [name for name in storage.names() if name.startswith(".")] == []
        if KILLER.survived:
            break
    assert published(storage) is None


def test_an_error_takes_back_what_was_written(storage: Storage) -> None:
    publish(storage, b"old")
    with contextlib.suppress(ZeroDivisionError), Publication(storage, "data", MARKER) as publication:
        publication.create(publication.unique("a.bin")).close()
        raise ZeroDivisionError
    assert published(storage) == b"old"
    assert len(storage.names("data")) == 2
    assert storage.names() == ["data"]
