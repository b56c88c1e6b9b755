"""Hugging Face datasets: from functions, classes with `to_hf()` and `load_dataset(...)` in a default."""

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from mlx_runtime.data.loaders import DatasetShard, LoaderOptions
from mlx_runtime.datasets import Batched
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import DatasetError

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "locks"


def numbers(rows: int = 10) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": list(range(rows)), "pair": [[row, row] for row in range(rows)]})


class Numbers:
    def __init__(self, rows: int = 10, batch_size: int = 3):
        self.rows, self.batch_size = rows, batch_size

    def to_hf(self) -> datasets.Dataset:
        return numbers(self.rows).shuffle()  # under the seed of the run


def shard(dataset: Any, rank: int = 0, workers: int = 1, name: str = "train", **node: Any) -> DatasetShard:
    topology = Topology(rank, workers, torch.device("cpu"))
    node["_target_"] = "test_huggingface.numbers"
    return DatasetShard(name, SimpleNamespace(**{name: dataset}), topology, LoaderOptions(seed=7), node=node)


def read(*shards: DatasetShard) -> list[list[int]]:
    return [batch["x"].tolist() for one in shards for batch in one.iter_torch_batches()]


@pytest.mark.parametrize("make", [lambda: numbers(), lambda: Numbers(), lambda: Batched(numbers(), batch_size=3)])
def test_every_row_once_in_equal_steps_whatever_it_comes_from(make: Any) -> None:
    ranks = [read(shard(make(), rank, 2, batch_size=3)) for rank in range(2)]
    assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(10))
    assert list(map(len, ranks)) == [2, 2]
    assert read(shard(make(), 0, 2, batch_size=3)) == ranks[0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (numbers(), "datasets.train has batch_size None; give the function that returns it an argument batch_size, or"),
        (datasets.DatasetDict(train=numbers(), test=numbers()), "datasets.train has the splits train, test; choose"),
        (Batched([1, 2]), r"datasets.train: Batched.to_hf\(\) returned list; it must return a datasets.Dataset"),
    ],
)
def test_what_cannot_be_read_is_one_line(dataset: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read(shard(dataset))
    assert "\n" not in str(caught.value)


def test_one_process_of_a_machine_loads_rows_while_the_others_wait(locks: Path) -> None:
    held = []

    class Checked(Numbers):
        def to_hf(self) -> datasets.Dataset:
            (lock,) = locks.iterdir()
            with lock.open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(lock)
            return super().to_hf()

    read(shard(Checked()))
    with held[0].open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def stream(rows: int = 40, shards: int = 4) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"x": list(range(rows))}).to_iterable_dataset(num_shards=shards)


class Stream:
    def __init__(self, rows: int = 40, batch_size: int = 3):
        self.rows, self.batch_size = rows, batch_size
        self.shuffle_buffer = 10

    def __len__(self) -> int:
        return self.rows

    def to_hf(self) -> datasets.IterableDataset:
        return stream(40)


@pytest.mark.parametrize("make", [Stream, lambda: Batched(stream(), batch_size=3, rows=40)])
def test_a_stream_is_read_once_in_equal_steps_and_in_an_order_of_the_seed(make: Any) -> None:
    loaders = [shard(make(), rank, 2).iter_torch_batches() for rank in range(2)]
    epochs = [[[batch["x"].tolist() for batch in loader] for loader in loaders] for _ in range(2)]
    for ranks in epochs:
        assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(40))
        assert [len(rank) for rank in ranks] == [7, 7]
    assert epochs[0] != epochs[1]
    assert [read(shard(make(), rank, 2)) for rank in range(2)] == epochs[0]
    assert read(shard(make(), name="val"))[0] == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupted_stream_continues_on_any_number_of_workers(workers: int) -> None:
    before = [shard(Stream(), rank, 2).iter_torch_batches() for rank in range(2)]
    passes = [iter(loader) for loader in before]
    taken = [[next(one)["x"].tolist() for _ in range(4)] for one in passes]
    state = before[0].state_dict()
    after = [shard(Stream(), rank, workers).iter_torch_batches() for rank in range(workers)]
    for loader in after:
        loader.load_state_dict(state)
    left = [[batch["x"].tolist() for batch in loader] for loader in after]
    assert sorted(row for rank in (*taken, *left) for batch in rank for row in batch) == list(range(40))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            stream(),
            r"IterableDataset has no length; give the number of rows in one pass: Batched\(..., rows=N\)",
        ),
        (Stream(41), r"datasets.train: Stream ended after 40 samples, but __len__\(\) is 41"),
    ],
)
def test_a_stream_of_unknown_or_wrong_length_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read(shard(dataset, batch_size=3))
