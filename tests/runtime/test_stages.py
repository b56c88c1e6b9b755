"""Which pass the loop is in, told from the batches that its loaders give, without a word of user code."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from mlx_runtime import BaseModule, TrainConfig
from mlx_runtime.datasets import DatasetShard, DatasetShards
from mlx_runtime.experiment import WorkerRun
from mlx_runtime.layout import RunFolder
from mlx_runtime.parallel import Worker


class Rows(Dataset):
    def __init__(self, rows: int):
        self.rows, self.batch_size = rows, 1

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor(index)

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Log(list):
    """A tracker that remembers (stage of the first value or None, step)."""

    def send(self, event: dict) -> None:
        pass


@pytest.fixture
def loop(tmp_path):
    module = BaseModule(cfg=TrainConfig(log_every_steps=1), losses=SimpleNamespace(), metrics=SimpleNamespace())
    module._run = WorkerRun(RunFolder(tmp_path), Worker(0, 1, torch.device("cpu")), {}, Log())
    group = SimpleNamespace(train=Rows(3), extra=Rows(5), val=Rows(2), one=Rows(1))
    worker = module._run.worker
    shards = DatasetShards({name: DatasetShard(name, group, worker, seed=0) for name in vars(group)})
    loaders = dict(zip(vars(group), module.generate_loaders(dataset_shards=shards), strict=True))

    def log() -> tuple[str, int]:
        module.save_metrics_and_losses(0, 0)
        return module._run.stage.name, module.global_step

    return SimpleNamespace(**loaders, log=log, module=module)


def test_one_after_the_other(loop) -> None:
    seen = [loop.log() for loader in (loop.train, loop.val, loop.train) for _ in loader]
    assert [name for name, _ in seen] == ["train"] * 3 + ["val"] * 2 + ["train"] * 3
    assert [step for _, step in seen] == [1, 2, 3, 3, 3, 4, 5, 6]


def test_a_set_of_one_step_and_no_logging_in_training(loop) -> None:
    for _ in loop.one:
        pass
    assert [loop.log() for _ in loop.val] == [("val", 1)] * 2


def test_side_by_side_counts_the_first_training_set(loop) -> None:
    assert [loop.log() for _ in zip(loop.train, loop.extra)] == [  # noqa: B905
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]


@pytest.mark.parametrize("order", [("train", "val"), ("val", "train")])
def test_side_by_side_with_an_evaluation_set_in_any_order(loop, order: tuple[str, str]) -> None:
    pair = zip(*(getattr(loop, name) for name in order))  # noqa: B905 - the shorter ends it
    assert [loop.log() for _ in pair] == [("train", 1), ("train", 2)]


def test_evaluation_in_the_middle_of_training(loop) -> None:
    seen = []
    for number, _ in enumerate(loop.train):
        seen.append(loop.log())
        if number == 1:
            seen += [loop.log() for _ in loop.val]
    assert seen == [("train", 1), ("train", 2), ("val", 2), ("val", 2), ("train", 3)]


def test_evaluation_broken_off_in_the_middle_of_training(loop) -> None:
    seen = []
    for _ in loop.train:
        seen.append(loop.log())
        for _ in loop.val:
            seen.append(loop.log())
            break
    assert seen == [("train", 1), ("val", 1), ("train", 2), ("val", 2), ("train", 3), ("val", 3)]


def test_training_broken_off_at_its_first_step(loop) -> None:
    for _ in loop.train:
        loop.log()
        break
    assert [loop.log() for _ in loop.val] == [("val", 1)] * 2
