"""Which pass the loop is in, told from the batches that its loaders give, without a word of user code."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset
from torchmetrics import CatMetric, MeanMetric

from mlx_runtime import BaseModule, MlxError, TrainConfig
from mlx_runtime.datasets import DatasetShard, DatasetShards
from mlx_runtime.errors import DatasetError
from mlx_runtime.experiment import WorkerRun
from mlx_runtime.layout import RunFolder
from mlx_runtime.parallel import Worker

pytestmark = pytest.mark.pure


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
    """Hears events, and keeps nothing."""

    def send(self, event: dict) -> None:
        pass


@pytest.fixture
def loop(tmp_path):
    module = BaseModule(cfg=TrainConfig(log_every_steps=1), losses=SimpleNamespace(), metrics=SimpleNamespace())
    module._run = WorkerRun(RunFolder(tmp_path), Worker(0, 1, torch.device("cpu")), {}, Log())
    group = SimpleNamespace(train=Rows(3), extra=Rows(5), val=Rows(2), one=Rows(1))
    worker = module._run.worker
    shards = DatasetShards(
        {name: DatasetShard(name, group, worker, seed=0, watched=module._watched) for name in vars(group)}
    )
    loaders = dict(zip(vars(group), module.generate_loaders(dataset_shards=shards), strict=True))

    def log() -> tuple[str, int]:
        module.save_metrics_and_losses(0, 0)
        return module._run.stage.name, module.global_step

    return SimpleNamespace(**loaders, log=log, module=module, shards=shards)


def test_a_single_loader_is_unpacked_or_asked_for(loop) -> None:
    only = DatasetShards({"val": loop.shards.val})
    (unpacked,) = loop.module.generate_loaders(only)
    for loader in (unpacked, loop.module.generate_loaders(loop.shards.val)):
        assert [loop.log() for batch in loader if batch["x"].shape] == [("val", 0)] * 2
        assert len(loader) == 2
    cure = r"or loader = self.generate_loaders\(dataset_shards.val\)"
    with pytest.raises(DatasetError, match=rf"this is the loader of datasets.val and not a batch, .* {cure}"):
        [batch["x"] for batch in loop.module.generate_loaders(only)]


def test_one_after_the_other(loop) -> None:
    seen = [loop.log() for loader in (loop.train, loop.val, loop.train) for _ in loader]
    assert [name for name, _ in seen] == ["train"] * 3 + ["val"] * 2 + ["train"] * 3
    assert [step for _, step in seen] == [1, 2, 3, 3, 3, 4, 5, 6]


def test_loaders_of_shards_are_those_of_generate_loaders(loop) -> None:
    """Also when the loop asks for them in each epoch, as with Ray Data."""
    assert loop.shards.train.iter_torch_batches() is loop.train
    shards = (loop.shards.train, loop.shards.val)
    seen = [loop.log() for _ in range(2) for shard in shards for _ in shard.iter_torch_batches()]
    assert [name for name, _ in seen] == (["train"] * 3 + ["val"] * 2) * 2
    assert [step for _, step in seen] == [1, 2, 3, 3, 3, 4, 5, 6, 6, 6]
    assert loop.train.epoch == 2


def test_another_batch_size_applies_from_the_next_pass(loop) -> None:
    list(loop.train)
    larger = loop.shards.train.iter_torch_batches(batch_size=2)
    assert larger is not loop.train
    assert [len(batch["x"]) for batch in larger] == [2, 1]
    assert loop.shards.train.iter_torch_batches(batch_size=2) is larger
    assert larger.epoch == 2
    assert [len(batch["x"]) for batch in loop.shards.train.iter_torch_batches(2, drop_last=True)] == [2]


@pytest.mark.parametrize(
    ("name", "cure"), [("local_shuffle_buffer_size", "each epoch shuffles"), ("shufle", "it takes batch_size and drop")]
)
def test_what_a_loader_does_not_take_is_refused(loop, name: str, cure: str) -> None:
    with pytest.raises(MlxError, match=rf"iter_torch_batches\({name}=...\) is not supported; {cure}"):
        loop.shards.train.iter_torch_batches(**{name: 5})


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


class TestLoadersOfOnesOwn:
    """Loops over what the runtime does not know, named by the argument or not at all."""

    @pytest.fixture
    def told(self, loop, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, float], int]]:
        """What is recorded of metrics: values and global step."""
        told = []
        loop.module.metrics = SimpleNamespace(mean=MeanMetric(), rows=CatMetric())

        def report(values: dict[str, float], step: int, epoch: int) -> None:
            told.append(({name: value for name, value in values.items() if "mean" in name or "rows" in name}, step))

        monkeypatch.setattr(loop.module, "_report", report)
        return told

    @staticmethod
    def read(loop, values: list[float], stage: str | None = None, loader=None) -> None:
        loop.module.reset_all_metrics_and_losses()
        for number, (value, _) in enumerate(zip(values, loader or values, strict=True)):
            loop.module.metrics.mean.update(value)
            loop.module.metrics.rows.update(value)
            loop.module.save_metrics_and_losses(number, 0, stage=stage)

    @pytest.mark.parametrize("leave", ["break", "zip"])
    @pytest.mark.parametrize("then", ["reset", "checkpoint", "pass", "end"])
    def test_a_pass_that_is_left_early_is_recorded_by_what_comes_next(
        self, loop, told, leave: str, then: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop.module.cfg.log_every_steps = 50
        for number, _ in enumerate(zip(loop.extra, loop.val) if leave == "zip" else loop.extra):  # noqa: B905
            loop.module.metrics.mean.update(1.0 + number)
            loop.module.save_metrics_and_losses(number, 0)
            if number == 1:
                break
        assert told == []
        if then == "reset":
            loop.module.reset_all_metrics_and_losses()
        elif then == "checkpoint":
            monkeypatch.setattr(loop.module, "_store", lambda *_, **__: None)
            loop.module.save_checkpoint(epoch=0)
        elif then == "pass":
            next(iter(loop.train))
        else:
            loop.module._end()
        assert [item for item in told if item[0]] == [({"extra/mean": 1.5}, 2)]
        loop.module._finish_passes()
        assert len([item for item in told if item[0]]) == 1

    def test_evaluation_after_training_is_recorded_once(self, loop, told) -> None:
        self.read(loop, [1.0, 2.0, 6.0], loader=loop.train)
        self.read(loop, [5.0, 7.0], stage="val")
        self.read(loop, [8.0], stage="test")
        loop.module._end()
        del told[:3]
        assert [item for item in told if item[0]] == [({"val/mean": 6.0}, 3), ({"test/mean": 8.0, "test/rows": 8.0}, 3)]

    def test_training_counts_steps_and_evaluation_does_not(self, loop, told) -> None:
        self.read(loop, [1.0, 3.0])
        self.read(loop, [5.0])
        self.read(loop, [4.0], stage="val")
        self.read(loop, [6.0])
        loop.module._end()
        assert [item for item in told if item[0]] == [
            ({"train/mean": 1.0}, 1),
            ({"train/mean": 2.0}, 2),
            ({"train/mean": 5.0}, 3),
            ({"train/rows": 5.0}, 3),
            ({"val/mean": 4.0, "val/rows": 4.0}, 3),
            ({"train/mean": 6.0}, 4),
            ({"train/rows": 6.0}, 4),
        ]

    def test_saving_after_a_pass_is_of_that_pass(self, loop, told) -> None:
        for value, _ in zip([1.0, 2.0, 6.0], loop.train, strict=True):
            loop.module.metrics.mean.update(value)
        loop.module.save_metrics_and_losses(2, 0)
        loop.module._end()
        assert [item for item in told if item[0]] == [({"train/mean": 3.0}, 3)]
        assert loop.module.global_step == 3
