"""Inputs of runs are removed with the last run that names them.

<storage>/
    .inputs/<SHA-256>          a dataset
    first/run_001/             run.json and conf.yaml, which name it
    second/sweep_001/          run.json, whose definition names it
"""

import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from faults import wait_for
from storages import put

from mlx_runtime.cli import mlx
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.outputs.inputs import remove_unused_inputs
from mlx_runtime.storage.files import storage_at, to_json

pytestmark = pytest.mark.pure


def stored(root: Path, content: bytes = b"rows", *, age_s: float = 3600) -> str:
    name = inputs.store(str(root), lambda file: file.write(content))
    age(root / ".inputs" / name, age_s)
    return name


def age(path: Path, seconds: float = 3600) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def run(root: Path, title: str, conf: str = "", **fields: object) -> Path:
    folder = root / title
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(to_json({"status": "SUCCEEDED", **fields}))
    if conf:
        (folder / "conf.yaml").write_text(conf)
    return folder


def names(root: Path) -> list[str]:
    return sorted(item.name for item in (root / ".inputs").iterdir())


def test_an_input_stays_while_a_run_or_a_sweep_names_it(tmp_path: Path) -> None:
    one, two, three = (stored(tmp_path, content) for content in (b"1", b"2", b"3"))
    run(tmp_path, "first/run_001", f"cfg:\n  dataset_files: {{train: 'ray:{one}'}}\n")
    run(tmp_path, "second/sweep_001", definition={"overrides": [f"++cfg.dataset_files={{train:'{two}'}}"]})
    assert remove_unused_inputs(str(tmp_path)) == 1
    assert names(tmp_path) == sorted([one, two])
    assert three not in names(tmp_path)


def test_removing_the_last_run_removes_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path))
    name = stored(tmp_path)
    for title in ("first/run_001", "first/run_002", "second/run_001"):
        run(tmp_path, title, f"cfg: {{checkpoint_file: {name}}}\n", end="2026-01-01T00:00:00+00:00")
    for title, left in (("first/run_001", True), ("second/run_001", True), ("first/run_002", False)):
        done = CliRunner().invoke(mlx, ["xp", "rm", *title.split("/"), "--yes"])
        assert done.exit_code == 0, done.output
        assert (name in names(tmp_path)) is left
        assert ("removed 1 input that no run uses any more" in done.output) is not left


def test_an_input_whose_run_may_be_about_to_start_stays(tmp_path: Path) -> None:
    name = stored(tmp_path, age_s=60)
    assert remove_unused_inputs(str(tmp_path)) == 0
    age(tmp_path / ".inputs" / name)
    assert inputs.store(str(tmp_path), lambda file: file.write(b"rows")) == name  # for another run
    assert remove_unused_inputs(str(tmp_path)) == 0
    assert names(tmp_path) == [name]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    stored(tmp_path)
    for name in (".part-killed", ".part-writing"):
        (tmp_path / ".inputs" / name).mkdir()
        (tmp_path / ".inputs" / name / "content").write_bytes(b"half")
        age(tmp_path / ".inputs" / name)
    age(tmp_path / ".inputs" / ".part-killed" / "content")
    (tmp_path / ".inputs" / f".{'0' * 64}").write_bytes(b"half removed")
    age(tmp_path / ".inputs" / f".{'0' * 64}")
    assert remove_unused_inputs(str(tmp_path)) == 3
    assert names(tmp_path) == [".part-writing"]


def test_nothing_is_removed_if_a_run_cannot_be_read(tmp_path: Path) -> None:
    name = stored(tmp_path)
    (tmp_path / "first" / "run_001").mkdir(parents=True)
    (tmp_path / "first" / "run_001" / "conf.yaml").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"cannot read .*conf.yaml"):
        remove_unused_inputs(str(tmp_path))
    assert names(tmp_path) == [name]


def test_a_run_that_starts_at_the_same_moment_keeps_its_input(tmp_path: Path) -> None:
    removed = 0
    for number in range(300):
        content = b"rows %d" % number
        name = stored(tmp_path, content)
        start = threading.Barrier(2)

        def remove(start: threading.Barrier = start) -> None:
            nonlocal removed
            start.wait()
            removed += remove_unused_inputs(str(tmp_path))

        remover = threading.Thread(target=remove)
        remover.start()
        start.wait()
        if number == 0:
            remover.join()
        time.sleep((number % 30) / 30_000)
        inputs.store(str(tmp_path), lambda file, content=content: file.write(content))
        remover.join()
        assert (tmp_path / ".inputs" / name).read_bytes() == content
    assert removed > 0


@pytest.mark.s3
def test_inputs_in_an_object_store(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = s3.format(tmp_path.name)
    one, other = (inputs.store(root, lambda file, content=content: file.write(content)) for content in (b"1", b"2"))
    put(root, {"first/run_001/run.json": b"{}", "first/run_001/conf.yaml": one.encode()})
    assert remove_unused_inputs(root) == 0  # they are new
    monkeypatch.setattr("mlx_runtime.runs.outputs.inputs.NEW_S", 4.0)
    time.sleep(5)
    assert inputs.store(root, lambda file: file.write(b"2")) == other  # new again
    assert remove_unused_inputs(root) == 0
    assert wait_for(lambda: remove_unused_inputs(root), 60) == 1
    assert storage_at(root).names(".inputs") == [one]
