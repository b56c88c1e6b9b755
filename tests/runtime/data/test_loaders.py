"""Loaders of every kind: their batches, their positions, and their errors."""

import random
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
import tripwire
from torch.utils.data import Dataset, IterableDataset

from mlx_runtime.companions.prepared.store import PreparedSet
from mlx_runtime.data.batches import check
from mlx_runtime.data.loaders import DatasetShard, Loader, LoaderOptions, reading_processes
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, DatasetError

pytestmark = pytest.mark.pure


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


def shard(
    dataset: Dataset,
    rank: int = 0,
    world_size: int = 1,
    name: str = "train",
    prepared: PreparedSet | None = None,
    **options: Any,
) -> DatasetShard:
    topology = Topology(rank, world_size, torch.device("cpu"))
    group = SimpleNamespace(**{name: dataset})
    return DatasetShard(name, group, topology, LoaderOptions(seed=7, **options), prepared=prepared)


def test_rows_go_by_the_data_parallel_rank() -> None:
    """Workers that hold one replica of the model together read the same rows."""

    def read(rank: int, **sizes: int) -> list[list[int]]:
        topology = Topology(rank, device=torch.device("cpu"), **sizes)
        loader = DatasetShard(
            "train", SimpleNamespace(train=Rows()), topology, LoaderOptions(seed=7)
        ).iter_torch_batches()
        return [batch["x"][:, 0].tolist() for batch in loader]

    replicas = [read(rank, world_size=2) for rank in range(2)]
    workers = [read(rank, world_size=4, model_parallel_size=2) for rank in range(4)]
    assert workers == [replicas[0], replicas[0], replicas[1], replicas[1]]


def test_only_training_sets_are_shuffled_unless_the_dataset_says() -> None:
    fixed, chosen = Rows(), Rows()
    chosen.shuffle = True  # type: ignore[attr-defined]
    assert shard(Rows(), name="train_extra").shuffle
    assert not shard(fixed, name="val").shuffle
    assert shard(chosen, name="val").shuffle


@pytest.mark.parametrize(
    ("names", "training"),
    [
        ("train values devices valley tester evaluate_me developers predictor evil rows", True),
        (
            "val val_large valA val2 vals valid validation test tests test_b eval evaluation dev predict predictions",
            False,
        ),
    ],
)
def test_whole_words_tell_what_is_trained_on(names: str, training: bool) -> None:
    assert [name for name in names.split() if shard(Rows(), name=name).training is not training] == []


def test_a_dataset_says_whether_it_is_trained_on() -> None:
    says = Rows()
    says.training = True  # type: ignore[attr-defined]
    assert (shard(says, name="val").training, shard(says, name="val").shuffle) == (True, True)
    says.training = False  # type: ignore[attr-defined]
    assert (shard(says).training, shard(says).shuffle) == (False, False)
    prepared = PreparedSet("", cast(Any, None), {"training": True})
    assert shard(Rows(), name="val", prepared=prepared).training


class Noisy(Rows):
    """Random augmentation: each sample contains a random number."""

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(1).item()])


class Numbers(IterableDataset):
    """A stream in a random order."""

    def __init__(self, rows: int = 37, batch_size: int = 3, given: int | None = None):
        self.rows, self.batch_size, self.given = rows, batch_size, rows if given is None else given

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(torch.randperm(self.given))

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])[:, None]}


def read(loader: Loader) -> list[list[int]]:
    return [batch["x"][:, 0].tolist() for batch in loader]


@pytest.mark.process
@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_is_shared_out_without_touching_the_random_numbers_of_training(processes: int) -> None:
    loaders = [shard(Numbers(), rank, 2, processes=processes).iter_torch_batches() for rank in range(2)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = [read(loader) for loader in loaders]
    if not processes:
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = [read(loader) for loader in loaders]
    for ranks in (first, second):
        assert [len(batches) for batches in ranks] == [len(loaders[0])] * 2
        assert sorted(row for batches in ranks for batch in batches for row in batch) == list(range(37))
    assert first != second


@pytest.mark.process
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("dataset", [Noisy(), Numbers()], ids=["rows", "stream"])
def test_reading_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch, dataset: Dataset, processes: int) -> None:
    """A process that a worker has forked cannot use CUDA."""
    wanted = read(shard(dataset, processes=processes).iter_torch_batches())
    tripwire.install(monkeypatch.setattr)
    assert read(shard(dataset, processes=processes).iter_torch_batches()) == wanted


def test_a_stream_that_ends_early_is_told() -> None:
    message = r"datasets.train: Numbers ended after \d+ samples, but __len__\(\) is 37"
    with pytest.raises(DatasetError, match=message):
        read(shard(Numbers(given=30)).iter_torch_batches())


@pytest.mark.parametrize("dataset", [Rows(rows=53), Numbers(rows=53)])
def test_other_workers_go_on_with_the_rows_that_are_left(dataset: Dataset) -> None:
    seen, state = [], {}
    for rank in range(3):
        loader = shard(dataset, rank, 3).iter_torch_batches()
        passing = iter(loader)
        seen += [row for _ in range(4) for row in next(passing)["x"][:, 0].tolist()]
        state = loader.state_dict()
    for rank in range(2):
        loader = shard(dataset, rank, 2).iter_torch_batches(batch_size=5)
        loader.load_state_dict(state)
        seen += [row for batch in read(loader) for row in batch]
    assert sorted(seen) == list(range(53))


@pytest.mark.process
@pytest.mark.parametrize("dataset", [Rows(rows=53), Numbers(rows=53)])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_limited_pass_reads_as_many_batches_and_goes_on_where_it_stood(dataset: Dataset, processes: int) -> None:
    loaders = [shard(dataset, rank, 2, limit=4, processes=processes).iter_torch_batches() for rank in range(2)]
    assert [(len(loader), loader.rows) for loader in loaders] == [(4, 24)] * 2
    whole = [read(loader) for loader in loaders]
    assert [[len(batch) for batch in batches] for batches in whole] == [[3] * 4] * 2
    assert len({row for batches in whole for batch in batches for row in batch}) == 24
    interrupted = shard(dataset, 0, 2, limit=4).iter_torch_batches()
    passing = iter(interrupted)
    begun = [next(passing)["x"][:, 0].tolist() for _ in range(3)]
    assert interrupted.current is not None
    assert interrupted.current.steps_left == 1
    other = shard(dataset, 0, 2, limit=4).iter_torch_batches()
    other.load_state_dict(interrupted.state_dict())
    assert begun + read(other) == whole[0]
    alone = shard(dataset, limit=4).iter_torch_batches()
    alone.load_state_dict(interrupted.state_dict())
    assert sum(len(batch) for batch in read(alone)) == 6  # the remaining rows of the two workers, of 24


def test_a_limit_counts_batches_and_not_the_updates_that_accumulate_them() -> None:
    train, val = (shard(Rows(rows=53), limit=3, name=name, accumulate=2) for name in ("train", "val"))
    loader = train.iter_torch_batches()
    assert (len(loader), loader.rows, loader.updates) == (3, 9, 2)
    assert len(val.iter_torch_batches()) == 3
    alone = shard(Rows(rows=53), limit=2, wanted_workers=4, accumulate=2).iter_torch_batches()
    wanted = shard(Rows(rows=53), 0, 4, limit=2, wanted_workers=4, accumulate=2).iter_torch_batches()
    assert alone.rows == wanted.rows == 24


def test_going_on_with_other_rows_is_refused() -> None:
    loader = shard(Rows()).iter_torch_batches()
    under_way = iter(loader)
    next(under_way)
    other = shard(Rows(rows=11)).iter_torch_batches()
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DatasetError, match="has 11 rows, but had 10 when the run was interrupted"):
        next(iter(other))


@pytest.mark.parametrize("loader", ["ray", "workers=-1"])
def test_a_wrong_loader_is_refused(loader: str) -> None:
    with pytest.raises(ConfigError, match=f"cfg.loader is '{loader}'; write auto, or workers=N"):
        reading_processes(loader)


class WithoutSamples(Dataset):
    pass


class Stream(IterableDataset):
    @staticmethod
    def ray_map_batches(batch):
        return batch


class Scalar(Rows):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.tensor(1.0)}


class Nothing(Rows):
    @staticmethod
    def ray_map_batches(batch):
        return batch["item"]


class Mixed(Rows):
    """Texts, ids, and lists of token ids of different lengths, next to tensors."""

    def __getitem__(self, index):
        return index, f"row {index}", list(range(index))

    @staticmethod
    def ray_map_batches(batch):
        numbers, texts, tokens = zip(*batch["item"], strict=True)
        return {
            "x": torch.tensor(numbers),
            "number": numbers,
            "scalar": [torch.tensor(number) for number in numbers],
            "array": np.array(numbers),
            "text": texts,
            "tokens": list(tokens),
            "pairs": [[number, number] for number in numbers],
            "path": np.array(texts),
            "note": "as it is",
            "nothing": None,
        }


@pytest.mark.parametrize("processes", [0, 1], ids=["here", "beside"])
def test_what_is_no_number_is_passed_through(processes: int) -> None:
    batches = list(shard(Mixed(6), name="val", processes=processes).iter_torch_batches())
    assert len(batches) == 2
    for batch in batches:
        rows = batch["x"].tolist()
        for name in ("number", "scalar", "array"):
            assert batch[name].tolist() == rows
        assert list(batch["text"]) == batch["path"].tolist() == [f"row {row}" for row in rows]
        assert batch["tokens"] == [list(range(row)) for row in rows]
        assert batch["pairs"] == [[row, row] for row in rows]  # a list, whatever the lengths
        assert (batch["note"], batch["nothing"]) == ("as it is", None)


class Drawn(Noisy):
    """Random augmentation by generators of its own, which also depends on the epoch."""

    def __init__(self, rows: int = 10):
        super().__init__(rows)
        self.numpy, self.old = np.random.default_rng(1), np.random.RandomState(1)
        self.python, self.torch = random.Random(1), torch.Generator()
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        drawn = [self.numpy.random(), self.old.rand(), self.python.random(), torch.rand((), generator=self.torch)]
        return torch.tensor([index, self.epoch, *drawn])


class DrawnStream(Drawn, IterableDataset):
    """A stream in an order that depends on a generator of its own."""

    def __init__(self, rows: int):
        super().__init__(rows)
        self.classes = {"a": 1}

    def __iter__(self):
        return (self[int(row)] for row in self.numpy.permutation(self.rows))


class HFDrawn:
    """A stream of several files, shuffled by Hugging Face."""

    batch_size = 3

    def __len__(self):
        return 53

    def to_hf(self):
        rows = datasets.Dataset.from_dict({"x": [[row] for row in range(53)]})
        return rows.to_iterable_dataset(num_shards=4).with_format("torch")


@pytest.mark.process
@pytest.mark.parametrize("kind", [lambda: Drawn(53), lambda: DrawnStream(53), HFDrawn], ids=["rows", "stream", "hf"])
def test_rows_are_a_function_of_seed_and_epoch_for_every_reader_and_wherever_a_pass_continues(kind: Any) -> None:
    """Also their numbers, of the dataset's own generators and in each epoch; no two batches get the same ones."""

    def loader(rank: int, processes: int = 0) -> Loader:
        return shard(kind(), rank, 2, processes=processes).iter_torch_batches()

    def batches(loader: Loader) -> list[list[list[float]]]:
        return [batch["x"].tolist() for batch in loader]

    once = [loader(rank) for rank in range(2)]
    epochs = [[batches(of_rank) for of_rank in once] for _ in range(2)]
    for epoch, ranks in enumerate(epochs):
        samples = [sample for of_rank in ranks for batch in of_rank for sample in batch]
        assert sorted(sample[0] for sample in samples) == list(range(53))
        if kind is not HFDrawn:
            assert {sample[1] for sample in samples} == {epoch}
            assert len({number for sample in samples for number in sample[2:]}) == 4 * 53
    assert epochs[0] != epochs[1]
    for rank in range(2):
        for processes in (1, 2):
            other = loader(rank, processes)
            other.epoch = 1
            passing = iter(other)
            begun = [next(passing)["x"].tolist() for _ in range(4)]
            resumed = loader(rank, processes=1 - min(1, processes))
            resumed.load_state_dict(other.state_dict())
            assert begun + batches(resumed) == epochs[1][rank]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            WithoutSamples,
            r"datasets.train: WithoutSamples has no __getitem__, which returns its samples",
        ),
        (Stream, r"datasets.train: Stream is an IterableDataset without __len__"),
    ],
)
def test_a_class_that_cannot_be_batched_is_refused(cls: type, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        check(cls, "datasets.train")


@pytest.mark.parametrize(
    ("dataset", "world_size", "message"),
    [
        (Rows(batch_size=None), 1, "datasets.train has batch_size None; set self.batch_size"),
        (Rows(rows=0), 1, "datasets.train has no rows"),
        (Rows(rows=2), 3, "datasets.train has 2 rows, fewer than the 3 workers"),
        (
            Rows(rows=10, batch_size=6),
            2,
            "datasets.train has 10 rows, too few for one full batch per worker: 2 workers with batch_size 6. Lower",
        ),
    ],
)
def test_a_dataset_that_cannot_be_split_is_refused(dataset: Dataset, world_size: int, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        len(shard(dataset, world_size=world_size).iter_torch_batches())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Scalar(), r"ray_map_batches returned 'x' of shape \(\) for 3 samples"),
        (Nothing(), "ray_map_batches returned list; it must return"),
    ],
)
def test_a_wrong_batch_is_told(dataset: Dataset, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        next(iter(shard(dataset).iter_torch_batches()))


@pytest.mark.process
def test_a_sample_that_raises_in_a_reading_process_is_one_line_and_its_place() -> None:
    with pytest.raises(DatasetError) as caught:
        list(shard(Rows(rows=1001), name="val", processes=1).iter_torch_batches())
    first, place = str(caught.value).splitlines()
    assert first == "datasets.val cannot be read: OSError: bad sector (while reading sample 1000 of datasets.val)"
    assert place.startswith('  File "')
    assert "test_loaders.py" in place


def test_a_sample_that_raises_is_named() -> None:
    read = []
    with pytest.raises(OSError, match="bad sector") as caught:
        read += (batch for batch in shard(Rows(rows=1001), name="val").iter_torch_batches())
    assert len(read) == 333  # those before the one with sample 1000
    assert caught.value.__notes__ == ["while reading sample 1000 of datasets.val"]
