"""A session in this process: the order of events, restored state, and reports."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults import differences
from sessions import ALONE, Events, Rows, attach, session_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

from mlx_runtime import BaseModule, TrainConfig
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, LoaderOptions
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, DatasetError, MlxError
from mlx_runtime.events import CheckpointSaved, EpochEnded, Notice, WarningNotice
from mlx_runtime.runs.checkpoints.index import list_checkpoints
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.pure


class Experiment(BaseModule):
    """Four steps per epoch, with a schedule that `worker_loop` makes."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)
        super().__init__(
            cfg=TrainConfig(log_every_steps=1, num_epochs=3, **settings),
            models=SimpleNamespace(net=net),
            optimizers=SimpleNamespace(sgd=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)),
            metrics=SimpleNamespace(mean=MeanMetric()),
        )

    def worker_loop(self, dataset_shards: DatasetShards, epochs: int = 3, stop_at: int | None = None) -> None:
        (train,) = self.generate_loaders(dataset_shards)
        self.schedule = self.scheduled(train.updates * epochs)
        for epoch in range(self.cfg.start_epoch, epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.backward(self.models.net(batch["x"]).square().mean())
                self.optimizer_step()
                self.schedule.step()
                self.metrics.mean.update(batch["x"])
                self.save_metrics(batch_idx=batch_idx, epoch=epoch)
                if epoch * len(train) + batch_idx + 1 == stop_at:
                    raise KeyboardInterrupt
            self.save_checkpoint(epoch=epoch)

    def scheduled(self, steps: int) -> LRScheduler:
        return ExponentialLR(self.optimizers.sgd, 0.9)


class Regrouped(Experiment):
    """The loop gives the bias a learning rate of its own."""

    def worker_loop(self, dataset_shards: DatasetShards, **options: Any) -> None:
        sgd, net = self.optimizers.sgd, self.models.net
        sgd.param_groups[0]["params"] = [net.weight]
        sgd.add_param_group({"params": [net.bias], "lr": 0.1})
        super().worker_loop(dataset_shards, **options)


class Dropping(Experiment):
    """Drops values at random; the others are so large that one update of half precision is left out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.models.net.register_forward_hook(lambda net, args, output: nn.functional.dropout(output, 0.3) / 1.7)


class Ending(Experiment):
    """The schedule has a fixed number of steps."""

    def scheduled(self, steps: int) -> LRScheduler:
        sgd = self.optimizers.sgd
        return SequentialLR(sgd, [LinearLR(sgd), OneCycleLR(sgd, 0.1, total_steps=steps - 1)], milestones=[2])


def run(experiment: Experiment, folder: Path, sink: Events | None = None, **loop: Any) -> Experiment:
    session = attach(experiment, folder, sink=sink)
    session.begin()
    group, accumulate = SimpleNamespace(train=Rows(8)), LoaderOptions(accumulate=experiment.cfg.accumulate_grad_batches)
    options = {"train": DatasetShard("train", group, ALONE, accumulate, follow=session.watch)}
    try:
        experiment.worker_loop(DatasetShards(options), **loop)
        session.end()
    except KeyboardInterrupt:
        session.checkpoints.settle()
    return experiment


def state(experiment: Experiment) -> dict[str, Any]:
    session = session_of(experiment)
    return {
        "weights": experiment.models.net.state_dict(),
        "optimizer": experiment.optimizers.sgd.state_dict(),
        "schedule": experiment.schedule.state_dict(),
        "mean": session.reporter.latest["train/mean"],
        "scaler": session.optimization.state_dict(),
        "step": experiment.global_step,
    }


class TestRestart:
    """A run that was interrupted ends as one that was not."""

    @pytest.mark.parametrize("made", [Experiment, Regrouped])
    @pytest.mark.parametrize("every", [None, 1])
    def test_after_an_epoch_or_within_one(self, tmp_path: Path, every: int | None, made: type[Experiment]) -> None:
        notice = self.check(tmp_path, made, checkpoint_every_steps=every)
        assert notice.endswith(f"(epoch {1 if every is None else 2}, step {4 if every is None else 6})")

    def test_within_an_update_of_several_steps_in_half_precision(self, tmp_path: Path) -> None:
        settings = {"accumulate_grad_batches": 2, "gradient_clip": 0.5, "checkpoint_every_steps": 1}
        assert self.check(tmp_path, Dropping, precision="fp16", **settings).endswith("(epoch 2, step 2)")

    def check(self, folder: Path, made: type[Experiment], **settings: Any) -> str:
        """Interrupt a run after its seventh step, and compare it with a whole one. Return its notice."""
        whole = run(made(**settings), folder / "whole")
        run(made(**settings), folder / "parts", stop_at=7)
        events = Events()
        resumed = run(made(**settings), folder / "parts", sink=events)
        assert differences(state(resumed), state(whole)) == []
        (notice,) = [event for event in events if isinstance(event, Notice)]
        return notice.text

    def test_a_loop_that_ignores_where_it_was(self, tmp_path: Path) -> None:
        class FromTheStart(Experiment):
            def worker_loop(self, dataset_shards: DatasetShards, **options: Any) -> None:
                self.cfg.start_epoch = 0
                super().worker_loop(dataset_shards, **options)

        run(Experiment(), tmp_path, epochs=2)
        run(FromTheStart(), tmp_path, sink=(events := Events()), epochs=1)
        (_, notice) = [event for event in events if isinstance(event, Notice)]
        assert notice.text.startswith(
            "the loop begins with epoch 0, not with cfg.start_epoch=2; epochs count from 0: write"
        )

    def test_nothing_is_left_to_train(self, tmp_path: Path) -> None:
        run(Experiment(), tmp_path)
        events = Events()
        again = run(Experiment(), tmp_path, sink=events)
        assert again.cfg.start_epoch == 3
        assert Notice("already at epoch 3 of 3; raise cfg.num_epochs to train further") in events

    def test_a_loop_that_ends_at_once_is_explained(self, tmp_path: Path) -> None:
        """As after early stopping, although there are more epochs."""
        first, again = Events(), Events()
        for events in (first, again):
            run(Experiment(), tmp_path, sink=events, epochs=1)
        text = "worker_loop returned at epoch 1 of 3 without training. If early stopping ended the run, "
        assert [
            sum(text in event.text for event in events if isinstance(event, Notice)) for events in (first, again)
        ] == [0, 1]

    def test_a_schedule_that_would_end_in_the_middle_is_refused(self, tmp_path: Path) -> None:
        run(Ending(), tmp_path, epochs=1)
        again = Ending()
        with pytest.raises(
            ConfigError,
            match="self.schedule in the checkpoint does not fit .*: OneCycleLR ends after 3 steps, .* for 11",
        ):
            run(again, tmp_path)
        assert again.global_step == 4


class Carried:
    """What each worker carries from step to step."""

    per_worker = True

    def __init__(self, decay: float = 0.5):
        self.decay, self.value = decay, None


class Carrying(Experiment):
    """Resets what it carries before each pass; the reset is undone where a pass is resumed."""

    def __init__(self) -> None:
        super().__init__(checkpoint_every_steps=1)
        self.tools = SimpleNamespace(carried=Carried())

    def reset_all_metrics_and_losses(self) -> None:
        super().reset_all_metrics_and_losses()
        self.tools.carried.value = torch.zeros(1)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.tools.carried.value = self.tools.carried.decay * self.tools.carried.value + loss.detach()
        super().backward(loss + self.tools.carried.value * self.models.net.weight.sum(), **options)


class Late(Experiment):
    def save_metrics(self, **position: Any) -> None:
        super().save_metrics(**position)
        self.average = AveragedModel(self.models.net)


def test_what_is_assigned_after_the_first_batch_is_reported_before_and_after_a_restart(tmp_path: Path) -> None:
    first, second = Events(), Events()
    run(Late(), tmp_path, sink=first, stop_at=7)
    run(Late(), tmp_path, sink=second)
    text = "self.average: assigned after the first batch, and so not restored by a resumed run; assign it before"
    assert (first.count(Notice(text)), second.count(Notice(text))) == (1, 1)
    assert Notice("self.average is not restored: assign it before the first batch") in second


class TestStateOfEachWorker:
    def test_it_is_restored_within_an_epoch(self, tmp_path: Path) -> None:
        whole = run(Carrying(), tmp_path / "whole")
        run(Carrying(), tmp_path / "parts", stop_at=7)
        resumed = run(Carrying(), tmp_path / "parts")
        assert differences(state(resumed), state(whole)) == []
        saved = CheckpointStore(RunFolder(tmp_path / "whole").checkpoints)
        _, found = saved.newest(print)
        assert found["tools"] == {}
        assert found["ranks"][0]["per_worker"]["tools.carried"] == vars(whole.tools.carried)

    def test_it_starts_over_with_another_number_of_workers(self, tmp_path: Path) -> None:
        run(Carrying(), tmp_path, stop_at=7)
        events, again = Events(), Carrying()
        attach(again, tmp_path, sink=events, topology=Topology(0, 2, torch.device("cpu"))).begin()
        assert again.tools.carried.value is None
        text = "tools.carried starts over: each worker had its own state, and the number of workers has changed"
        assert Notice(text) in events

    def test_it_starts_over_with_replicas_of_other_sizes(self, tmp_path: Path) -> None:
        run(Carrying(), tmp_path, stop_at=7)
        saved = CheckpointStore(RunFolder(tmp_path).checkpoints)
        about, found = saved.newest(print)
        saved.save(found | {"ranks": 2 * found["ranks"], "world_size": 2, "replica_sizes": [1, 1]}, about)
        events, pipeline = Events(), Topology(0, 2, torch.device("cpu"), model_parallel_size=2)
        attach(Carrying(), tmp_path, sink=events, topology=pipeline).begin()
        text = "tools.carried starts over: each worker had its own state, and the sizes of the replicas have changed"
        assert Notice(text) in events


class Numbers(Experiment):
    """Everything that user code gives the runtime is a number of NumPy; passes have one step."""

    def worker_loop(self, dataset_shards: DatasetShards, **_: Any) -> None:
        (train,) = self.generate_loaders(dataset_shards)
        for epoch in np.arange(2):
            for batch_idx, _batch in zip(np.arange(1), train, strict=False):
                self.save_metrics(batch_idx=batch_idx, epoch=epoch)
            self.log({"a": np.float32(0.5), "b": np.int64(2), "c": np.array(3.0), "d": np.bool_(True)})
            self.save_checkpoint(epoch=epoch, metrics={"e": np.float16(0.25)})


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    events = Events()
    experiment = run(Numbers(monitor="e"), tmp_path, sink=events)
    latest = session_of(experiment).reporter.latest
    found = {name: latest[name] for name in "abcde"}
    assert found == {"a": 0.5, "b": 2.0, "c": 3.0, "d": 1.0, "e": 0.25}
    assert {type(value) for value in found.values()} == {float}
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert [json.loads(json.dumps([event.epoch, event.metrics["e"]])) for event in saved] == [[0, 0.25], [1, 0.25]]
    names = [item.name for item in list_checkpoints(RunFolder(tmp_path).checkpoints)]
    assert names == ["epoch_0001", "epoch_0002"]


def accuracies(**options: Any) -> MetricCollection:
    """Two thresholds, between which no value of the first batch lies."""
    return MetricCollection({"low": BinaryAccuracy(0.3), "high": BinaryAccuracy(0.7)}, **options)


def test_members_of_a_collection_count_by_themselves(tmp_path: Path) -> None:
    """Unless user code states its groups. TorchMetrics merges members whose states are equal after one batch."""
    experiment = Experiment()
    experiment.metrics = SimpleNamespace(both=accuracies(), stated=accuracies(compute_groups=[["low", "high"]]))
    session = attach(experiment, tmp_path)
    session.begin()
    late = accuracies()
    for values in ([0.1, 0.9], [0.5, 0.5]):
        for metric in (*vars(experiment.metrics).values(), late):
            metric.update(torch.tensor(values), torch.tensor([values[0] > 0.4, 1]))
    experiment.save_metrics(batch_idx=0, epoch=0, stage="val")
    session.metrics.flush()
    assert session.reporter.latest == {
        "val/both_low": 1,
        "val/both_high": 0.5,
        "val/stated_low": 1,
        "val/stated_high": 1,
    }
    experiment.metrics.late = late
    with pytest.raises(ConfigError, match="^metrics.late has merged high and low, .* compute_groups=False"):
        session.metrics.check()


@pytest.mark.parametrize("made", [lambda item: {"x": (item,)}, lambda item: nn.ModuleList([item])])
def test_metrics_that_would_not_be_recorded(tmp_path: Path, made: Callable[[Any], Any]) -> None:
    experiment = Experiment()
    experiment.metrics = SimpleNamespace(mean=MeanMetric(), several=made(MeanMetric()))
    with pytest.raises(ConfigError, match=r"^metrics.several is a (dict|ModuleList), .* MetricCollection"):
        attach(experiment, tmp_path).begin()
    experiment.losses = experiment.metrics = SimpleNamespace(mean=MeanMetric())
    with pytest.raises(
        ConfigError, match=r"^losses.mean and metrics.mean would be recorded under one name; rename one$"
    ):
        attach(experiment, tmp_path).begin()


def test_attributes_of_tools_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    """They end the run before training if they would come back as something else."""
    experiment, events = Experiment(), Events()
    experiment.tools = SimpleNamespace(counter=SimpleNamespace(count=1, history=[object()], last=object()))
    session = attach(experiment, tmp_path, sink=events)
    session.begin()
    experiment.save_checkpoint(epoch=0)
    session.checkpoints.settle()
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice.startswith("not in checkpoints: tools.counter.history, tools.counter.last; only numbers, text and ")
    experiment.tools = SimpleNamespace(words=SimpleNamespace(counts=defaultdict(lambda: 0)))
    with pytest.raises(ConfigError, match=r"^SimpleNamespace.counts contains a defaultdict, whose factory "):
        attach(experiment, tmp_path).begin()


def test_the_speed_in_what_a_row_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "row_counts", {"tokens": np.int64(64)}, raising=False)
    events = Events()
    run(Experiment(), tmp_path / "tokens", sink=events)
    assert [event.row_counts for event in events if isinstance(event, EpochEnded)] == [{"tokens": 64}] * 3
    monkeypatch.setattr(Rows, "row_counts", {"tokens": "64"})
    refused = r"^datasets.train: its attribute row_counts is {'tokens': '64'}; write units per row, like "
    with pytest.raises(DatasetError, match=refused):
        run(Experiment(), tmp_path / "refused")


class TestReports:
    """Lines for the user."""

    def test_a_number_that_is_not_finite_and_a_monitor_that_is_not_recorded(self, tmp_path: Path) -> None:
        events = Events()
        experiment = Experiment(monitor="val/loss")
        session = attach(experiment, tmp_path, sink=events)
        for value in (float("nan"), float("inf")):
            experiment.log({"own": torch.tensor(value)})
        for epoch in range(2):
            experiment.save_checkpoint(epoch=epoch)
        session.end()
        first, second = [event.text for event in events if isinstance(event, WarningNotice)]
        assert first.startswith("not finite at step 0 of epoch 1: own. ")
        kept = "the newest checkpoints are kept. Available: own."
        assert second == f"cfg.monitor is 'val/loss', which is not recorded yet; {kept}"

    def test_outside_of_a_run(self) -> None:
        with pytest.raises(MlxError, match="inside worker_loop"):
            Experiment().log({"own": 1.0})
        Experiment().reset_all_metrics_and_losses()
