"""Streams of Ray Data, assigned in this process to the readers of two workers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import ray.data
import torch

from mlx_runtime.companions.ray import start as ray_start
from mlx_runtime.companions.ray.stream_reader import StreamAssigner, StreamReader
from mlx_runtime.data.loaders import DatasetShard, Loader
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import DatasetError
from mlx_runtime.loop.options import TrainConfig

pytestmark = pytest.mark.cluster

ROWS = 3000


class Numbers:
    """3,000 rows in 10 blocks, shuffled by Ray Data if there is a seed."""

    def __init__(self, batch_size: int = 50, said: int = ROWS, text: bool = False, broken: bool = False):
        self.batch_size, self.said, self.text, self.broken = batch_size, said, text, broken
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.said

    def to_ray(self, seed: int | None = None):
        text, broken, epoch = self.text, self.broken, self.epoch

        def made(batch):
            if broken and 1500 in batch["id"]:
                raise ValueError("no such column")
            rows = len(batch["id"])
            return {"x": np.array(["a"] * rows) if text else batch["id"], "epoch": np.full(rows, epoch)}

        stream = ray.data.range(ROWS, override_num_blocks=10).map_batches(made)
        return stream.randomize_block_order(seed=seed) if seed is not None else stream


@pytest.fixture(scope="module", autouse=True)
def with_ray() -> Iterator[None]:
    with ray_start.start_ray(TrainConfig(start_workers=1)):
        yield
        for assigner in ASSIGNERS:
            assigner.close()


ASSIGNERS: list[StreamAssigner] = []


def assign(name: str = "train", copies: Sequence[int] = (), **arguments: object) -> StreamAssigner:
    assigner = StreamAssigner({"_target_": f"{__name__}.Numbers", **arguments}, name, 0, Path(__file__).parent, copies)
    ASSIGNERS.append(assigner)
    return assigner


def loaders(
    workers: int = 2,
    name: str = "train",
    batch_size: int = 50,
    replicas: tuple[tuple[int, ...], ...] = (),
    **arguments: object,
) -> list[Loader]:
    size = len([rank for ranks in replicas for rank in ranks]) or workers
    topologies = [Topology(rank, size, torch.device("cpu"), replica_ranks=replicas) for rank in range(size)]
    assigner = assign(name, [*map(len, replicas)], batch_size=batch_size, **arguments)
    group = SimpleNamespace(**{name: Numbers(batch_size)})
    return [
        DatasetShard(
            name,
            group,
            topology,
            stream=StreamReader(assigner, name, topology.model_parallel_rank),
        ).iter_torch_batches()
        for topology in topologies
    ]


def read(loader: Loader) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def together(ranks: list[Loader]) -> list[list[list[int]]]:
    """Return the batches of each rank, read in lockstep."""
    steps = list(zip(*ranks, strict=True))
    return [[batch[rank]["x"].tolist() for batch in steps] for rank in range(len(ranks))]


def test_every_row_once_in_equal_steps_and_in_another_order_each_epoch() -> None:
    ranks = loaders()
    first, second = together(ranks), together(ranks)
    for seen in (first, second):
        assert [len(batches) for batches in seen] == [len(ranks[0])] * 2 == [30, 30]
        assert sorted(row for batches in seen for batch in batches for row in batch) == list(range(ROWS))
    assert first != second
    assert together(loaders()) == first
    (alone,) = loaders(1)
    assert [next(iter(alone))["epoch"][0].item() for _ in range(2)] == [0, 1]


def test_workers_that_hold_a_replica_together_read_the_same_rows() -> None:
    """Replicas may have different numbers of workers, which leave each pass."""
    replicas = loaders(replicas=((0, 2, 3), (1,)))
    for seen in (together(replicas), together(replicas), together(replicas)):
        assert seen[0] == seen[2] == seen[3] != seen[1]
        assert sorted(row for batches in seen[:2] for batch in batches for row in batch) == list(range(ROWS))


def test_a_set_that_is_not_trained_on_comes_in_its_own_order() -> None:
    assert [row for batch in read(loaders(1, "val")[0]) for row in batch] == list(range(ROWS))


@pytest.mark.parametrize("stop", [1, 29])
def test_the_same_workers_go_on_with_the_very_batches(stop: int) -> None:
    whole = together(loaders())
    interrupted = loaders()
    passes = [iter(loader) for loader in interrupted]
    begun = [[next(of_rank)["x"].tolist() for _ in range(stop)] for of_rank in passes]
    others = loaders()
    for loader, other in zip(interrupted, others, strict=True):
        other.load_state_dict(loader.state_dict())
        assert other.state_dict() == loader.state_dict()  # even before its first batch
    assert [a + b for a, b in zip(begun, together(others), strict=True)] == whole


def test_another_number_of_workers_goes_on_with_the_rows_that_are_left() -> None:
    interrupted = loaders()
    passes = [iter(loader) for loader in interrupted]
    seen = [row for _ in range(25) for of_rank in passes for row in next(of_rank)["x"].tolist()]
    others = loaders(3)
    for other in others:
        other.load_state_dict(interrupted[0].state_dict())
    seen += [row for batches in together(others) for batch in batches for row in batch]
    assert sorted(seen) == list(range(ROWS))


def test_a_pass_that_is_broken_off_leaves_the_next_one_whole() -> None:
    ranks = loaders()
    for _ in range(3):
        for loader in ranks:
            next(iter(loader))
    seen = together(ranks)
    assert sorted(row for batches in seen for batch in batches for row in batch) == list(range(ROWS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"broken": True}, "datasets.train cannot be read: ValueError: no such column"),
        ({"text": True}, "datasets.train: column 'x' is .*, not numbers of one shape"),
        ({"said": ROWS + 1}, r"datasets.train: to_ray\(\) returned 3000 rows, but __len__\(\) is 3001"),
        ({"said": ROWS - 1}, r"datasets.train: to_ray\(\) returned more rows than its __len__, 2999"),
    ],
)
def test_what_goes_wrong_is_told_to_every_worker(arguments: dict, message: str) -> None:
    assigner = assign(**arguments)
    for rank in range(2):
        worker = Topology(rank, 2, torch.device("cpu"))
        group = SimpleNamespace(train=Numbers(**arguments))  # type: ignore[arg-type]
        shard = DatasetShard("train", group, worker, stream=StreamReader(assigner, "train"))
        with pytest.raises(DatasetError, match=message):
            list(shard.iter_torch_batches())
