"""The choice of the leading pass, and records of passes that end early, without any calls by user code."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import ALONE, Events, Rows, attach
from torch import nn
from torch.optim.swa_utils import update_bn
from torchmetrics import CatMetric, MeanMetric

from mlx_runtime import BaseModule, MlxError, TrainConfig
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader, LoaderOptions
from mlx_runtime.errors import DatasetError
from mlx_runtime.events import Notice
from mlx_runtime.loop.stopping import LoopStopped

pytestmark = pytest.mark.pure

ROWS = {"train": 3, "extra": 5, "val": 2, "one": 1}
"""Datasets by name, and their number of steps."""


class Real:
    """Loaders of a session in this process; the rows of each dataset are its steps."""

    def __init__(self, tmp_path) -> None:
        self.module = BaseModule(cfg=TrainConfig(log_every_steps=1), losses=None, metrics=SimpleNamespace())
        self.session = attach(self.module, tmp_path)
        group = SimpleNamespace(**{name: Rows(rows, batch_size=1) for name, rows in ROWS.items()})
        watch = self.session.watch
        shards = {name: DatasetShard(name, group, ALONE, follow=watch) for name in ROWS}
        self.shards = DatasetShards(shards)
        loaders = self.module.generate_loaders(dataset_shards=self.shards)
        self.train, self.extra, self.val, self.one = loaders

    def log(self, name: str | None = None) -> tuple[str, int]:
        self.module.save_metrics_and_losses(0, 0, stage=name)
        return self.session.metrics.unfinished.name, self.module.global_step

    def reset(self) -> None:
        self.module.reset_all_metrics_and_losses()


@pytest.fixture
def loop(tmp_path) -> Real:
    return Real(tmp_path)


TRAIN = [("train", 1), ("train", 2), ("train", 3)]


class TestOneAfterTheOther:
    """Passes that do not overlap."""

    @pytest.mark.parametrize("number", [1, 2])
    def test_training_is_left_early(self, loop, number: int) -> None:
        for _ in itertools.islice(loop.train, number):
            loop.log()
        assert [loop.log() for _ in loop.val] == [("val", number)] * 2
        assert [loop.log() for _ in loop.train] == [("train", number + step) for step in (1, 2, 3)]


class TestSideBySide:
    """Several loaders within one step: the training pass that gave its first batch first leads."""

    @pytest.mark.parametrize("longer", [True, False])
    def test_zip(self, loop, longer: bool) -> None:
        pair = (loop.train, loop.extra) if longer else (loop.extra, loop.train)
        name = "train" if longer else "extra"
        assert [loop.log() for _ in zip(*pair)] == [(name, step) for step in (1, 2, 3)]  # noqa: B905
        assert [loop.log()[0] for _ in loop.train] == ["train"] * 3

    def test_the_first_runs_out_and_the_loop_reads_on(self, loop) -> None:
        """`cycle` remembers the batches of a loader, and reads it only once."""
        seen = [loop.log() for _ in zip(itertools.cycle(loop.train), loop.extra)]
        assert seen == [*TRAIN, ("extra", 4), ("extra", 5)]

    @pytest.mark.parametrize("order", [("train", "val"), ("val", "train")])
    def test_an_evaluation_set_never_leads_beside_a_training_set(self, loop, order: tuple[str, str]) -> None:
        pair = zip(*(getattr(loop, name) for name in order))  # noqa: B905 - the shorter ends it
        assert [loop.log() for _ in pair] == [("train", 1), ("train", 2)]


def test_a_single_loader_is_unpacked_or_asked_for(loop) -> None:
    only = DatasetShards({"val": loop.shards.val})
    (unpacked,) = loop.module.generate_loaders(only)
    for loader in (unpacked, loop.module.generate_loaders(loop.shards.val)):
        assert [loop.log() for batch in loader if batch["x"].shape] == [("val", 0)] * 2
        assert len(loader) == 2
    cure = r"or loader = self.generate_loaders\(dataset_shards.val\)"
    with pytest.raises(DatasetError, match=rf"this is the loader of datasets.val and not a batch, .* {cure}"):
        [batch["x"] for batch in loop.module.generate_loaders(only)]


def test_loaders_of_shards_are_those_of_generate_loaders(loop) -> None:
    """Also if the loop requests its loaders in each epoch, as with Ray Data."""
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


class TestRecords:
    """Passes that end early, and loops over data that the runtime does not know."""

    @pytest.fixture
    def recorded(self, loop, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, float], int]]:
        """Return the recorded metrics: values and global step."""
        recorded = []
        loop.module.metrics = SimpleNamespace(mean=MeanMetric(), rows=CatMetric())

        def report(values: dict[str, float], step: int, epoch: int) -> None:
            recorded.append(({name: value for name, value in values.items() if name.endswith(("mean", "rows"))}, step))

        monkeypatch.setattr(loop.session.reporter, "record", report)
        return recorded

    @staticmethod
    def read(loop, values: list[float], stage: str | None = None, loader=None) -> None:
        loop.module.reset_all_metrics_and_losses()
        for number, (value, _) in enumerate(zip(values, loader or values, strict=True)):
            loop.module.metrics.mean.update(value)
            loop.module.metrics.rows.update(value)
            loop.module.save_metrics_and_losses(number, 0, stage=stage)

    @pytest.mark.parametrize("then", ["reset", "checkpoint", "pass", "end"])
    def test_a_pass_that_is_left_early_is_recorded_by_what_comes_next(
        self, loop, recorded, then: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop.module.cfg.log_every_steps = 50
        for number, _ in enumerate(loop.extra):
            loop.module.metrics.mean.update(1.0 + number)
            loop.module.save_metrics_and_losses(number, 0)
            if number == 1:
                break
        assert recorded == []
        if then == "reset":
            loop.module.reset_all_metrics_and_losses()
        elif then == "checkpoint":
            monkeypatch.setattr(loop.session.checkpoints, "save", lambda *_, **__: None)
            loop.module.save_checkpoint(epoch=0)
        elif then == "pass":
            next(iter(loop.train))
        else:
            loop.session.end()
        assert [item for item in recorded if item[0]] == [({"extra/mean": 1.5}, 2)]
        loop.session.metrics.flush()
        assert len([item for item in recorded if item[0]]) == 1


class Training:
    """Epochs of three steps of a small model, with something else between or within them."""

    def __init__(self, folder: Path, **settings: object) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.module = BaseModule(
            cfg=TrainConfig(log_every_steps=1, **settings),
            models=SimpleNamespace(net=self.net),
            optimizers=SimpleNamespace(sgd=sgd),
            metrics=SimpleNamespace(mean=MeanMetric()),
        )
        self.events = Events()
        self.session = attach(self.module, folder, sink=self.events)
        self.session.begin()
        group = SimpleNamespace(train=Rows(12), extra=Rows(20), val=Rows(2))
        options = LoaderOptions(seed=1)
        for name, dataset in vars(group).items():
            dataset.batch_size = 4
            shard = DatasetShard(name, group, ALONE, options, follow=self.session.watch)
            setattr(self, name, self.module.generate_loaders(shard))
        self.train: Loader
        self.seen: list[tuple[int, list[list[float]]]] = []

    def watched(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with the hooks that a worker registers for all of them."""
        optimizer.register_step_pre_hook(lambda item, *_: self.session.update_begins(item))
        optimizer.register_step_post_hook(lambda item, *_: self.session.update_finished(item))
        return optimizer

    def step(self, batch: dict[str, torch.Tensor], sgd: torch.optim.Optimizer) -> None:
        self.net(batch["x"]).square().mean().backward()
        sgd.step()
        self.module.metrics.mean.update(batch["x"])
        self.module.save_metrics(0, 0)
        self.seen.append((self.module.global_step, batch["x"].tolist()))

    def epoch(self, *, within: Callable[[], None] | None = None, stop_at: int = 0) -> None:
        sgd = self.watched(torch.optim.SGD(self.net.parameters(), lr=0.01))
        self.net.train()
        self.module.reset_all_metrics_and_losses()
        for number, batch in enumerate(self.train, 1):
            self.step(batch, sgd)
            if within is not None and number == 2:
                within()
                self.net.train()
            if number == stop_at:
                self.module.save_checkpoint(epoch=0)
                self.session.checkpoints.wait()
                break

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def stage(loop: Training) -> None:
    """With gradients, in train mode and with an optimizer of the models."""
    sgd = loop.watched(torch.optim.SGD(loop.net.parameters(), lr=0.0))
    with loop.module.stage("probe"):
        for batch in loop.train:
            loop.net(batch["x"]).sum().backward()
            sgd.step()
    sgd.zero_grad()


def neighbours(loop: Training) -> None:
    with loop.module.evaluation():
        for batch in loop.train:
            loop.net(batch["x"])
            loop.module.metrics.mean.update(batch["x"])
            loop.module.save_metrics(0, 0, stage="knn")


@torch.inference_mode()
def batch_norm(loop: Training) -> None:
    """`update_bn` reads without gradients, in train mode."""
    before = {name: value.clone() for name, value in loop.net.state_dict().items()}
    with loop.module.stage("statistics"):
        update_bn((batch["x"] for batch in loop.train), loop.net)
    loop.net.load_state_dict(before)


NO_UPDATE = (
    "no optimizer updated a model in a pass over train, which counts as training; call self.optimizer_step() after "
    'self.backward(loss), or, if it does not train, read it inside `with self.stage("probe"):`'
)

NOT_TRAINING = [stage, neighbours, batch_norm]


class TestNotTraining:
    """Reading training data in a stage or an evaluation does not affect training."""

    @pytest.mark.parametrize("read", NOT_TRAINING)
    @pytest.mark.parametrize("place", ["before", "between", "within"])
    def test_steps_epochs_and_order_stay(self, tmp_path: Path, read: Callable[[Training], None], place: str) -> None:
        alone, loop = Training(tmp_path / "alone"), Training(tmp_path / "loop")
        if place == "before":
            read(loop)
        for other in (alone, loop):
            for epoch in range(2):
                nested = place == "within" and other is loop
                other.epoch(within=(lambda: read(loop)) if nested else None)
                if place == "between" and other is loop:
                    read(loop)
                other.module.save_checkpoint(epoch=epoch)
        assert loop.seen == alone.seen
        assert [step for step, _ in loop.seen] == [1, 2, 3, 4, 5, 6]
        assert loop.train.state_dict() == alone.train.state_dict() == {"epoch": 2, "steps": 0}
        assert loop.session.reporter.latest["train/mean"] == alone.session.reporter.latest["train/mean"]
        assert loop.session.progress == alone.session.progress
        expected = "reading datasets.train holds up"  # on a busy machine
        assert [text for text in loop.notices + alone.notices if not text.startswith(expected)] == []

    @pytest.mark.parametrize("read", NOT_TRAINING)
    def test_an_interrupted_epoch_resumes_after_it(self, tmp_path: Path, read: Callable[[Training], None]) -> None:
        whole, first = Training(tmp_path / "whole"), Training(tmp_path / "parts")
        for _ in range(2):
            whole.epoch()
        first.epoch()
        first.epoch(stop_at=2)
        again = Training(tmp_path / "parts")
        read(again)
        again.epoch()
        assert first.seen + again.seen == whole.seen
        assert [step for step, _ in whole.seen] == [1, 2, 3, 4, 5, 6]
        assert again.train.epoch == whole.train.epoch == 2

    @pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("read", [0, 2])
    def test_a_batch_without_gradients_is_refused(self, tmp_path: Path, without: Any, read: int) -> None:
        """The first or a later one, also if it is of a set that is read alongside."""
        loop = Training(tmp_path)
        batches, beside = iter(loop.extra), iter(loop.train)
        next(batches)
        for _ in range(read):
            next(beside)
        with without(), pytest.raises(MlxError, match=r"^a batch of datasets.train, .* `with self.stage\("):
            next(beside)

    def test_a_pass_without_an_update_is_counted_and_reported(self, tmp_path: Path) -> None:
        """Like one with an optimizer of another model, or in eval mode."""
        loop = Training(tmp_path)
        loop.epoch()
        probe = loop.watched(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        loop.net.eval()
        for _ in loop.train:
            probe.step()
        loop.epoch()
        assert [step for step, _ in loop.seen] == [1, 2, 3, 7, 8, 9]
        assert loop.notices == [NO_UPDATE]

    @pytest.mark.parametrize("max_steps", [None, 2])
    def test_a_forgotten_optimizer_step_is_reported(self, tmp_path: Path, max_steps: int | None) -> None:
        loop = Training(tmp_path, max_steps=max_steps)
        with contextlib.suppress(LoopStopped):
            for batch in itertools.chain(loop.train, loop.train):
                loop.module.backward(loop.net(batch["x"]).square().mean())
        loop.session.end()
        assert [text for text in loop.notices if not text.startswith("finished")] == [NO_UPDATE]
