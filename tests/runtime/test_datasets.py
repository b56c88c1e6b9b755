"""Loaders: every row once, the same number of steps on every rank, an order that only seed and epoch decide."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from mlx_runtime.datasets import DatasetShard, check, epoch_order, rank_batches, reading_processes, steps
from mlx_runtime.errors import ConfigError, DatasetError


class Rows(Dataset):
    def __init__(self, rows: int = 10, batch_size: int | None = 3):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if index == 1000:
            raise OSError("bad sector")
        return torch.tensor([index, index])

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


def shard(dataset: Dataset, rank: int = 0, world_size: int = 1, name: str = "train", **options: object) -> DatasetShard:
    return DatasetShard(name, SimpleNamespace(**{name: dataset}), rank, world_size, 7, torch.device("cpu"), **options)  # type: ignore[arg-type]


def test_every_row_once_and_equal_steps_for_random_sizes() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        world_size, batch_size = chance.randint(1, 9), chance.randint(2, 12)
        rows = chance.randint(world_size, 150)
        order = epoch_order(rows, seed=1, epoch=0, shuffle=True)
        by_rank = [rank_batches(order, rank, world_size, batch_size) for rank in range(world_size)]
        assert {len(batches) for batches in by_rank} == {steps(rows, world_size, batch_size)}
        sizes = [len(batch) for batches in by_rank for batch in batches]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size
        assert sorted(row for batches in by_rank for batch in batches for row in batch) == list(range(rows))
        full = [len(batch) for batches in by_rank for batch in batches[:-2]]
        assert set(full) <= {batch_size}


def test_single_rows_leave_out_fewer_than_there_are_workers() -> None:
    by_rank = [rank_batches(torch.arange(11), rank, 3, 1) for rank in range(3)]
    assert [len(batches) for batches in by_rank] == [3, 3, 3]


def test_order_changes_with_epoch_and_seed_and_nothing_else() -> None:
    orders = {(seed, epoch): epoch_order(50, seed, epoch, shuffle=True).tolist() for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert epoch_order(50, 1, 1, shuffle=True).tolist() == orders[1, 1]
    assert epoch_order(5, 1, 1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_loader_is_read_again_in_another_order() -> None:
    loader = shard(Rows()).iter_torch_batches()
    first, second = ([batch["x"][:, 0].tolist() for batch in loader] for _ in range(2))
    assert len(loader) == len(first) == 4
    assert first != second
    for read in (first, second):
        assert sorted(row for batch in read for row in batch) == list(range(10))
    loader.epoch = 0
    assert [batch["x"][:, 0].tolist() for batch in loader] == first


def test_only_training_sets_are_shuffled_unless_the_dataset_says() -> None:
    fixed, chosen = Rows(), Rows()
    chosen.shuffle = True  # type: ignore[attr-defined]
    assert shard(Rows(), name="train_extra").shuffle
    assert not shard(fixed, name="val").shuffle
    assert shard(chosen, name="val").shuffle


def test_reading_processes_give_the_same_batches() -> None:
    alone, helped = shard(Rows()).iter_torch_batches(), shard(Rows(), reader="workers=2").iter_torch_batches()
    assert [batch["x"].tolist() for batch in alone] == [batch["x"].tolist() for batch in helped]


@pytest.mark.parametrize(("reader", "count"), [("auto", 0), ("workers=3", 3)])
def test_reader(reader: str, count: int) -> None:
    assert reading_processes(reader) == count


def test_a_wrong_reader_is_told() -> None:
    with pytest.raises(ConfigError, match="cfg.loader is 'worker=3'; write auto, or workers=N"):
        reading_processes("worker=3")


class WithoutStacking(Dataset):
    pass


class Stream(IterableDataset):
    pass


class Scalar(Rows):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.tensor(1.0)}


class Nothing(Rows):
    @staticmethod
    def ray_map_batches(batch):
        return batch["item"]


class Words(Rows):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": ["a"]}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (WithoutStacking, r"datasets.train: WithoutStacking has no ray_map_batches. Add a static method"),
        (Stream, r"datasets.train: Stream is an IterableDataset; give it __len__ and __getitem__"),
    ],
)
def test_a_class_that_cannot_be_batched_is_refused(cls: type, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        check(cls, "datasets.train")


@pytest.mark.parametrize(
    ("dataset", "world_size", "message"),
    [
        (Rows(batch_size=None), 1, "datasets.train has batch_size None; set self.batch_size"),
        (Rows(batch_size=0), 1, "datasets.train has batch_size 0"),
        (Rows(rows=0), 1, "datasets.train has 0 rows for 1 workers"),
        (Rows(rows=2), 3, "datasets.train has 2 rows for 3 workers; every worker needs one"),
    ],
)
def test_a_dataset_that_cannot_be_split_is_refused(dataset: Dataset, world_size: int, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        len(shard(dataset, world_size=world_size).iter_torch_batches())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Scalar(), r"ray_map_batches gave 'x' of shape \(\) for 3 samples"),
        (Nothing(), "ray_map_batches gave list; it must give"),
        (Words(), "ray_map_batches gave 'x', which is no tensor"),
    ],
)
def test_a_wrong_batch_is_told(dataset: Dataset, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        next(iter(shard(dataset).iter_torch_batches()))


def test_a_sample_that_raises_is_named() -> None:
    with pytest.raises(OSError, match="bad sector") as caught:
        list(shard(Rows(rows=1001), name="val").iter_torch_batches())
    assert caught.value.__notes__ == ["while reading sample 1000 of datasets.val"]
