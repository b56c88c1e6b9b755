"""Datasets, folds, models and checkpoints that travel between a script and the workers of its function."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx
from torch.utils.data import IterableDataset, TensorDataset

from mlx_runtime import Trainer, open_run
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.companions.notebook.pickles import Captured
from mlx_runtime.errors import StorageError, UsageError

SCRIPT = """
import json
import torch
from torch import nn
from torch.utils.data import TensorDataset
from mlx_runtime import MlxError, Trainer, get_dataset_shard, load_checkpoint, report, save_checkpoint


SCALE = 1


def batches(config):
    loader = get_dataset_shard("train").iter_torch_batches(batch_size=3)
    epochs = [[x.tolist() for x, y in loader] for _ in range(2)]
    held = [x.tolist() for x, y in get_dataset_shard("val").iter_torch_batches(batch_size=2)]
    return epochs, len(loader), held


def resumable(config):
    nn.Linear(2, 1)  # draws random numbers, also when it resumes
    seen, start = [], (load_checkpoint() or {"epoch": 0})["epoch"]
    loader = get_dataset_shard().iter_torch_batches(batch_size=2)
    for epoch in range(start, 3):
        for step, (x, y) in enumerate(loader):
            seen.append((epoch, x.tolist(), torch.rand(1).item()))
            if config["fails"] and (epoch, step) == (1, 1):
                save_checkpoint(epoch=epoch)
                raise ValueError("on purpose")
        report(rows=SCALE * len(seen))
    return seen


def folded(config):
    return [sorted(x.item() for x, y in get_dataset_shard(name)) for name in ("train", "val")]


def large(config):
    return torch.zeros(17_000_000)


def refused(*arguments, **options):
    try:
        trainer.run(*arguments, **options)
    except MlxError as error:
        return [type(error).__name__, str(error)]


def rows(count):
    return TensorDataset(torch.arange(count), torch.zeros(count))


def resuming():
    global SCALE
    whole = trainer.run(resumable, {"fails": False}, dataset=rows(17))
    for _ in range(2):
        refused(resumable, {"fails": True}, dataset=rows(17))
    other = refused(resumable, {"fails": False}, dataset=rows(18), resume="run_002")
    SCALE = 2
    edited = refused(resumable, {"fails": False}, dataset=rows(17), resume="run_002")
    SCALE = 1
    rest = trainer.run(resumable, {"fails": False}, dataset=rows(17), resume="run_002")
    alone = Trainer(num_workers=1).run(resumable, {"fails": False}, resume="run_003")
    return whole, rest, alone, other, edited


trainer = Trainer(num_workers=2)
both = {"train": rows(11), "val": rows(5)}
found = {
    "batches": trainer.run(batches, {}, dataset=both),
    "resuming": resuming(),
    "folds": trainer.run(folded, {}, dataset=rows(12), folds=3),
    "fold": trainer.run(folded, {}, dataset=rows(12), fold=(1, 3)),
    "large": refused(large, {}),
}
print(json.dumps(found))
"""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(python: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("datasets")
    (folder / "script.py").write_text(SCRIPT)
    done = python(folder, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1]) | {"folder": folder}


@pytest.mark.examples
class TestOnWorkers:
    def test_batches_have_every_row_once_in_a_new_order_each_epoch(self, found: Found) -> None:
        (one, steps, held), (other, other_steps, other_held) = found["batches"]
        assert steps == other_steps == len(one[0]) == len(other[0]) == 2
        for epoch in (0, 1):
            rows = [row for batches in (one[epoch], other[epoch]) for batch in batches for row in batch]
            assert sorted(rows) == list(range(11))
        assert one[0] != one[1]
        assert (held, other_held) == ([[0, 1], [4]], [[2], [3]])  # equal steps

    def test_a_resumed_function_reads_what_the_uninterrupted_one_would_have_read(self, found: Found) -> None:
        """An edited function, and one with another dataset, do not resume. The script needs no guard."""
        whole, rest, alone, other, edited = found["resuming"]
        for one, resumed in zip(whole, rest, strict=True):
            assert resumed[0][0] == 1  # in the middle of the second epoch
            assert 0 < len(resumed) < len(one)
            assert one[-len(resumed) :] == resumed  # rows and random numbers
        (own,) = alone
        before = [row for worker in whole for epoch, rows, _ in worker[:7] if epoch == 1 for row in rows]
        after = [row for epoch, rows, _ in own if epoch == 1 for row in rows]
        assert sorted(before + after) == list(range(17))
        assert other == [
            "UsageError",
            "resumable/run_002 was started with another dataset; leave out dataset= to resume it with its own, or "
            "resume= to start a new run",
        ]
        assert edited[1].startswith(
            "resumable/run_002 was started with another definition of SCALE; undo the edits, or "
        )

    def test_folds_hold_out_every_row_once(self, found: Found) -> None:
        held = []
        for workers in found["folds"]:
            train, val = ([row for worker in workers for row in worker[part]] for part in (0, 1))
            assert sorted(train + val) == list(range(12))
            assert len(val) == 4
            held += val
        assert sorted(held) == list(range(12))
        assert found["fold"] == found["folds"][1]
        runs = [open_run(found["folder"] / "runs" / "folded" / f"run_00{number}") for number in (1, 2, 3)]
        assert [run.config["cfg"]["fold"] for run in runs] == [[0, 3], [1, 3], [2, 3]]

    def test_large_values_are_refused_in_one_line(self, found: Found) -> None:
        assert found["large"][1] == (
            "__main__.large returned a Tensor on rank 0 of 68.0 MB, and 64.0 MB is the maximum; save it with "
            "save_checkpoint, and read it from trainer.latest_checkpoint"
        )


def named() -> None:
    """Do nothing."""


CAPTURED = Captured(named)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


ROWS = TensorDataset(torch.arange(4))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": Stream()}, r"^dataset is of type Stream; it takes a torch Dataset with __getitem__"),
        ({"dataset": [1, lambda: 0]}, r"^dataset, a list, cannot be sent to workers: .*lambda"),
        ({"dataset": ROWS, "fold": (3, 3)}, r"^fold is \(3, 3\); it takes the number of a fold and of all folds"),
    ],
)
def test_wrong_datasets_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=text):
        Trainer(num_workers=2).run(named, **options)


@pytest.mark.pure
class TestFiles:
    def test_a_changed_file_is_not_unpickled(self, tmp_path: Path) -> None:
        file = inputs.store_datasets(str(tmp_path), {"train": [1, 2]}, CAPTURED)["train"]
        path = tmp_path / ".inputs" / file
        path.write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "executed") + b"'\ntR.")
        with pytest.raises(StorageError, match=rf"{file} is damaged: remove it, then call trainer.run with the same"):
            inputs.load_dataset(str(tmp_path), file)
        assert not (tmp_path / "executed").exists()
        path.unlink()
        with pytest.raises(
            StorageError, match=rf"^cannot read .*{file}; call trainer.run with the same function, dataset="
        ):
            inputs.load_dataset(str(tmp_path), file)
        with pytest.raises(StorageError, match=r"^'../other' is not the SHA-256 of a file"):
            inputs.load_dataset(str(tmp_path), "../other")
