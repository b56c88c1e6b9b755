"""Budgets in steps: `cfg.max_steps`, `self.every`, evaluation within an epoch, and callbacks around batches."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Mlx
from sessions import ALONE, Events, Rows, attach, session_of
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric

from mlx_runtime import BaseModule, MlxError, TrainConfig
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, LoaderOptions
from mlx_runtime.events import CheckpointSaved, EpochEnded, Notice
from mlx_runtime.loop import stopping
from mlx_runtime.loop.stopping import LoopStopped
from mlx_runtime.runs.checkpoints import groups as groups_module
from mlx_runtime.sections import Debug, Elastic

pytestmark = pytest.mark.pure


class Total(CatMetric):
    """Keeps every row, so it is recorded for a whole pass only."""

    def compute(self) -> torch.Tensor:
        return super().compute().sum()


class Experiment(BaseModule):
    """Three epochs of six steps. An evaluation reads two batches of much larger values, and resets the metrics."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Dropout(0.2), nn.Linear(1, 1))
        super().__init__(
            cfg=TrainConfig(**{"log_every_steps": 2, "num_epochs": 3} | settings),
            models=SimpleNamespace(net=net),
            optimizers=SimpleNamespace(sgd=torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)),
            metrics=SimpleNamespace(
                mean=MeanMetric(),
                sum=SumMetric(),
                total=Total(),
                both=MetricCollection({"one": MeanMetric(), "two": MeanMetric()}, compute_groups=[["one", "two"]]),
            ),
        )
        self.evaluated: list[int] = []
        self.answers: list[bool] = []
        self.after_loop = False

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        train, val = self.generate_loaders(dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.models.net.train()
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in enumerate(train):
                self.backward(self.models.net(batch["x"]).square().mean())
                self.optimizer_step()
                self.update(batch["x"])
                self.save_metrics_and_losses(batch_idx, epoch)
                self.answers.append(self.every(self.cfg.evaluate_every_steps))
                if self.answers[-1]:
                    self.evaluated.append(self.global_step)
                    self.evaluate(val, epoch)
                    self.models.net.train()
            self.evaluate(val, epoch)
            self.save_checkpoint(epoch=epoch)
        self.after_loop = True

    @torch.no_grad()
    def evaluate(self, loader: Any, epoch: int) -> None:
        self.models.net.eval()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(loader):
            self.update(batch["x"])
            self.save_metrics_and_losses(batch_idx, epoch)

    def update(self, values: torch.Tensor) -> None:
        for metric in vars(self.metrics).values():
            metric.update(values)


def run(experiment: Experiment, folder: Path, **options: Any) -> tuple[Experiment, Events]:
    """Run the loop in this process, as a worker does."""
    sink = Events()
    session = attach(experiment, folder, sink=sink)
    session.begin()
    group = SimpleNamespace(train=Rows(12), val=Rows(4, first=1000.0))
    cfg = experiment.cfg
    options = {"accumulate": cfg.accumulate_grad_batches, "limit": cfg.debug.limit_batches, **options}
    shards = {
        name: DatasetShard(name, group, ALONE, LoaderOptions(**options), follow=session.watch) for name in vars(group)
    }
    with contextlib.suppress(LoopStopped):
        experiment.worker_loop(DatasetShards(shards))
    assert not session.stopping.stopped  # the run succeeds
    session.end()
    return experiment, sink


def state(experiment: Experiment) -> str:
    """Return everything that a resumed run has to have in common with an uninterrupted one."""
    weights, optimizer = experiment.models.net.state_dict(), experiment.optimizers.sgd.state_dict()
    return f"{weights} {optimizer} {session_of(experiment).reporter.latest} {experiment.global_step} {torch.rand(1)}"


def of_type(events: Events, kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


class TestMaxSteps:
    """The run ends after that many steps, as if it were interrupted there."""

    @pytest.mark.parametrize("limit", [4, 12, 17])
    @pytest.mark.parametrize("every", [None, 3])
    def test_a_raised_limit_continues_exactly(self, tmp_path: Path, limit: int, every: int | None) -> None:
        whole, _ = run(Experiment(evaluate_every_steps=every), tmp_path / "whole")
        expected = state(whole)
        first, events = run(Experiment(max_steps=limit, evaluate_every_steps=every), tmp_path / "parts")
        assert first.global_step == limit
        assert not first.after_loop
        saved = of_type(events, CheckpointSaved)
        assert (saved[-1].step, saved[-1].finished) == (limit, limit % 6 == 0)
        assert [item.step for item in saved] == [*range(6, limit + 1, 6), *([limit] if limit % 6 else [])]
        again, _ = run(Experiment(evaluate_every_steps=every), tmp_path / "parts")
        assert state(again) == expected
        assert first.evaluated + again.evaluated == whole.evaluated

    def test_steps_that_make_one_update_count_once(self, tmp_path: Path) -> None:
        whole, _ = run(Experiment(accumulate_grad_batches=4, max_steps=5), tmp_path / "whole")
        assert len(whole.answers) == 6 + 6 + 4
        assert whole.global_step == 5
        expected = state(whole)
        run(Experiment(accumulate_grad_batches=4, max_steps=3), tmp_path / "parts")
        again, _ = run(Experiment(accumulate_grad_batches=4, max_steps=5), tmp_path / "parts")
        assert state(again) == expected


class World:
    """Data that a loop draws itself; its position is part of checkpoints."""

    def __init__(self) -> None:
        self.position = 0.0

    def step(self) -> torch.Tensor:
        self.position += 1
        return torch.rand(4, 1) + self.position


class Own(BaseModule):
    """Epochs of two updates by two optimizers, without a dataset, and a schedule that the loop makes."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        nets = {name: nn.Linear(1, 1) for name in ("actor", "critic")}
        optimizers = {name: torch.optim.Adam(net.parameters(), lr=0.01) for name, net in nets.items()}
        super().__init__(
            cfg=TrainConfig(**{"num_epochs": 4} | settings),
            models=SimpleNamespace(**nets),
            optimizers=SimpleNamespace(**optimizers),
            metrics=SimpleNamespace(mean=MeanMetric()),
            tools=SimpleNamespace(world=World()),
        )
        for item in optimizers.values():  # as a worker does for all of them
            item.register_step_pre_hook(lambda item, *_: session_of(self).update_begins(item))
            item.register_step_post_hook(lambda one, *_: session_of(self).update_finished(one))
        self.answers: list[bool] = []

    def worker_loop(self, dataset_shards: Any, *, metrics: bool = False, stop_at: int | None = None) -> None:
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers.actor, 0.9)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx in range(2):
                x = self.tools.world.step()
                for name in ("actor", "critic"):
                    self.backward(getattr(self.models, name)(x).square().mean(), optimizer=name)
                    self.optimizer_step(name)
                self.schedule.step()
                self.answers.append(self.every(3))
                self.metrics.mean.update(x)
                if metrics:
                    self.save_metrics(batch_idx, epoch)
            if metrics:
                group, watch = SimpleNamespace(val=Rows(4)), session_of(self).watch
                with self.evaluation():
                    for batch_idx, batch in enumerate(
                        self.generate_loaders(DatasetShard("val", group, ALONE, follow=watch))
                    ):
                        self.metrics.mean.update(batch["x"])
                        self.save_metrics(batch_idx, epoch)
            self.log({"return": float(x.sum())})
            if self.global_step == stop_at:
                raise KeyboardInterrupt
            self.save_checkpoint(epoch=epoch)


def run_own(made: BaseModule, folder: Path, **loop: Any) -> tuple[str, Events]:
    """Run a loop without loaders; return its final state, and events."""
    sink = Events()
    session = attach(made, folder, sink=sink)
    session.begin()
    with contextlib.suppress(LoopStopped, KeyboardInterrupt):
        made.worker_loop(None, **loop)
        session.end()
    session.checkpoints.settle()
    names = "models", "optimizers", "tools"
    groups = [groups_module.state_of(getattr(made, name))[0] for name in names if getattr(made, name) is not None]
    own = getattr(made, "schedule", None) and made.schedule.state_dict()
    return f"{groups} {own} {session.reporter.latest} {made.global_step} {torch.rand(1)}", sink


class TestLoopsWithoutLoaders:
    """The updates of a loop that reads no loader of the runtime are its steps."""

    @pytest.mark.parametrize("metrics", [False, True])
    def test_steps_and_epochs_are_counted(self, tmp_path: Path, metrics: bool) -> None:
        made = Own(checkpoint_every_steps=3)
        _, events = run_own(made, tmp_path, metrics=metrics)
        assert [(item.epoch, item.epochs) for item in of_type(events, EpochEnded)] == [(epoch, 4) for epoch in range(4)]
        saved = [(item.step, item.epoch, item.finished) for item in of_type(events, CheckpointSaved)]
        assert saved == [(2, 0, True), (3, 1, False), (4, 1, True), (6, 2, True), (8, 3, True)]
        assert made.answers == [False, False, True] * 2 + [False] * 2

    @pytest.mark.parametrize("limit", [4, 5])
    def test_it_ends_at_a_limit_and_resumes(self, tmp_path: Path, limit: int) -> None:
        whole, _ = run_own(Own(), tmp_path / "whole")
        made = Own(max_steps=limit)
        _, events = run_own(made, tmp_path / "parts")
        assert Notice(f"finished  step {limit} of cfg.max_steps={limit}") in events
        last = of_type(events, CheckpointSaved)[-1]
        ended = limit % 2 == 0
        assert (made.global_step, last.step, last.epoch, last.finished) == (limit, limit, limit // 2 - ended, ended)
        resumed = Own()
        again, _ = run_own(resumed, tmp_path / "parts")
        assert resumed.global_step == (8 if ended else 9)  # an interrupted epoch is repeated
        assert (again == whole) == ended

    @pytest.mark.parametrize("metrics", [False, True])
    def test_what_the_loop_has_made_is_restored(self, tmp_path: Path, metrics: bool) -> None:
        whole, _ = run_own(Own(), tmp_path / "whole", metrics=metrics)
        run_own(Own(), tmp_path / "parts", stop_at=6, metrics=metrics)
        again, events = run_own(Own(), tmp_path / "parts", metrics=metrics)
        assert again == whole
        assert not [item for item in of_type(events, Notice) if not item.text.startswith("restored")]

    def test_a_request_stops_it_after_a_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stopping, "MAX_STEPS_PER_VOTE", 1)
        made = Own()
        session = attach(made, tmp_path, stop_requested=lambda: made.global_step == 3)
        session.begin()
        with pytest.raises(LoopStopped):
            made.worker_loop(None)
        session.checkpoints.settle()
        assert "epoch_0002_step_00000003" in [path.name for path in tmp_path.rglob("epoch_*")]
        _, events = run_own(Own(), tmp_path)
        assert "epoch 2 is repeated from its beginning" in "".join(item.text for item in of_type(events, Notice))

    def test_without_updates_an_epoch_is_a_step(self, tmp_path: Path) -> None:
        class Search(BaseModule):
            def worker_loop(self, dataset_shards: Any) -> None:
                for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
                    self.begun = epoch
                    self.save_checkpoint(epoch=epoch, metrics={"best": -epoch})

        _, events = run_own(made := Search(cfg=TrainConfig(num_epochs=9, max_steps=3)), tmp_path)
        assert (made.global_step, made.begun) == (3, 2)  # no epoch begins that is not saved
        assert [(item.epoch, item.values) for item in of_type(events, EpochEnded)] == [
            (epoch, {"best": -epoch}) for epoch in range(3)
        ]

    @pytest.mark.parametrize("restores", [False, True])
    def test_what_the_loop_has_made_and_saves_without_an_update(self, tmp_path: Path, restores: bool) -> None:
        class Search(BaseModule):
            def worker_loop(self, dataset_shards: Any) -> None:
                self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
                if restores:
                    self.restore_checkpoint()
                for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
                    self.average.n_averaged += 1
                    self.save_checkpoint(epoch=epoch)

        run_own(Search(cfg=TrainConfig(num_epochs=2)), tmp_path)
        made = Search(cfg=TrainConfig(num_epochs=3))
        if not restores:
            with pytest.raises(
                MlxError, match=r"^the loop saved self.average without restoring .* self.restore_checkpoint\(\) "
            ):
                run_own(made, tmp_path)
            return
        run_own(made, tmp_path)
        assert made.average.n_averaged == 3

    def test_settings_that_need_a_loader(self, tmp_path: Path) -> None:
        made = Own(debug=Debug(limit_batches=2), elastic=Elastic(keep_global_batch=True))
        with pytest.raises(MlxError, match=r"^cfg.elastic.keep_global_batch needs the loaders of self.generate_load"):
            run_own(made, tmp_path)
        _, events = run_own(Own(debug=Debug(limit_batches=2)), tmp_path / "other")
        assert [item.text[:37] for item in of_type(events, Notice)] == ["cfg.debug.limit_batches has no effect"]


class TestEvery:
    def test_an_update_of_several_steps_is_one(self, tmp_path: Path) -> None:
        experiment, _ = run(Experiment(evaluate_every_steps=2, accumulate_grad_batches=4, num_epochs=2), tmp_path)
        assert experiment.answers == [*[False] * 5, True] * 2  # updates of four and two steps
        assert experiment.evaluated == [2, 4]

    def test_steps_below_one_are_refused(self, tmp_path: Path) -> None:
        experiment = Experiment()
        attach(experiment, tmp_path)
        with pytest.raises(MlxError, match=r"^self.every\(0\) needs a number of steps, 1 or more, or None for never"):
            experiment.every(0)
        assert TrainConfig.out_of_range(
            TrainConfig(evaluate_every_steps=0, max_steps=0, debug=Debug(limit_batches=0))
        ) == [
            "cfg.max_steps is 0; the minimum is 1",
            "cfg.evaluate_every_steps is 0; the minimum is 1",
            "cfg.debug.limit_batches is 0; the minimum is 1",
        ]


class TestEvaluationWithinAnEpoch:
    """Metrics of the training pass continue after an evaluation that resets them."""

    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, float]]]:
        """Return step and value of each record, by name."""
        recorded: dict[str, list[tuple[int, float]]] = {}

        def record(self: Any, values: dict[str, float], step: int, epoch: int) -> None:
            for name, value in values.items():
                recorded.setdefault(name, []).append((step, value))

        monkeypatch.setattr("mlx_runtime.loop.reporting.Reporter.record", record)
        return recorded

    def test_records_are_those_of_a_run_without_it(self, tmp_path: Path, recorded: dict[str, Any]) -> None:
        run(Experiment(), tmp_path / "without")
        names = [f"train/{name}" for name in ("mean", "sum", "both_one", "both_two")]
        expected = {name: recorded[name] for name in names}
        assert [step for step, _ in expected["train/mean"]] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
        totals = dict(recorded["train/total"])
        recorded.clear()
        experiment, _ = run(Experiment(evaluate_every_steps=2), tmp_path / "with")
        assert experiment.evaluated == [2, 4, 6, 8, 10, 12, 14, 16, 18]
        assert {name: recorded[name] for name in names} == expected
        assert totals.items() <= dict(recorded["train/total"]).items()
        assert [step for step, _ in recorded["val/mean"]] == [2, 4, 6, 6, 8, 10, 12, 12, 14, 16, 18, 18]
        assert {value for _, value in recorded["val/mean"]} == {1001.5}

    def test_a_block_for_evaluation_changes_nothing_else(self, tmp_path: Path, recorded: dict[str, Any]) -> None:
        class Block(Experiment):
            def evaluate(self, loader: Any, epoch: int) -> None:
                net = self.models.net
                net[1].eval()  # a frozen part
                before = [part.training for part in net.modules()]
                with contextlib.suppress(KeyError), self.evaluation():
                    assert not any(part.training for part in net.modules())
                    assert not torch.is_grad_enabled()
                    assert self.metrics.mean.update_count == 0
                    for batch_idx, batch in enumerate(loader):
                        self.update(batch["x"])
                        self.save_metrics_and_losses(batch_idx, epoch)
                    raise KeyError
                assert [part.training for part in net.modules()] == before
                assert torch.is_grad_enabled()

        run(Experiment(evaluate_every_steps=2), tmp_path / "written")
        expected = dict(recorded)
        recorded.clear()
        run(Block(evaluate_every_steps=2), tmp_path / "block")
        names = [name for name in expected if "/mean" in name]
        assert {name: recorded[name] for name in names} == {name: expected[name] for name in names}

    @pytest.mark.parametrize("evaluates", [None, 3])
    def test_averages_are_recorded_of_each_interval_as_well(
        self, tmp_path: Path, recorded: dict[str, Any], evaluates: int | None
    ) -> None:
        """A resumed run records the same: the interval in which it was interrupted is not cut in two."""
        settings: dict[str, Any] = {"log_every_steps": 4, "num_epochs": 2, "evaluate_every_steps": evaluates}
        run(Experiment(**settings), tmp_path / "whole")
        expected, means = recorded["train/mean_interval"], recorded["train/mean"]
        steps = [4, 6, 10, 12] if evaluates is None else [3, 4, 6, 9, 10, 12]
        assert [step for step, _ in expected] == [step for step, _ in means] == steps
        lengths = torch.tensor(steps).diff(prepend=torch.tensor([0]))
        values = torch.tensor([value for _, value in expected])
        assert values.unique().numel() == len(values)  # other than means since the epoch began, they differ
        assert (lengths * values).view(2, -1).sum(1).div(6).tolist() == pytest.approx([5.5, 5.5])
        assert [value for step, value in means if step % 6 == 0] == [5.5, 5.5]
        assert [value for _, value in recorded["train/sum_interval"]] == (2 * lengths * values).tolist()
        assert not any(name.startswith("val") for name in recorded if "interval" in name)
        assert not any("total" in name for name in recorded if "interval" in name)  # it keeps rows
        recorded.clear()
        for limit in (5, 11):
            run(Experiment(max_steps=limit, **settings), tmp_path / f"{limit}")
            first = [item for item in recorded.pop("train/mean_interval") if item[0] < limit]  # the rest is rewound
            resumed, _ = run(Experiment(**settings), tmp_path / f"{limit}")
            again = recorded.pop("train/mean_interval")
            assert first + again == expected
            assert "train/mean_interval" not in session_of(resumed).reporter.latest

    def test_a_checkpoint_in_the_same_step(
        self, tmp_path: Path, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Saved by the loop or by the runtime, after an evaluation that leaves its data early."""
        evaluate = Experiment.evaluate

        def evaluate_and_save(self: Experiment, loader: Any, epoch: int) -> None:
            evaluate(self, itertools.islice(loader, 1), epoch)
            if self.evaluated[-1:] == [self.global_step] and self.global_step % 6:
                self.save_checkpoint(epoch=epoch)

        settings: dict[str, Any] = {"evaluate_every_steps": 4, "checkpoint_every_steps": 5}
        plain, _ = run(Experiment(**settings | {"checkpoint_every_steps": None}), tmp_path / "plain")
        recorded.clear()
        monkeypatch.setattr(Experiment, "evaluate", evaluate_and_save)
        whole, events = run(Experiment(**settings), tmp_path / "whole")
        expected = state(whole)
        assert [item.step for item in of_type(events, CheckpointSaved)][:3] == [4, 5, 6]
        assert {value for _, value in recorded["val/mean"]} == {1000.5}
        assert torch.equal(whole.models.net[1].weight, plain.models.net[1].weight)
        for limit in (4, 5, 8, 15, 16):
            run(Experiment(max_steps=limit, **settings), tmp_path / f"{limit}")
            again, _ = run(Experiment(**settings), tmp_path / f"{limit}")
            assert state(again) == expected, limit

    def test_a_reset_after_the_evaluation_starts_over(self, tmp_path: Path, recorded: dict[str, Any]) -> None:
        class Windows(Experiment):
            def evaluate(self, loader: Any, epoch: int) -> None:
                super().evaluate(loader, epoch)
                super().evaluate(loader, epoch)  # the reset before it is not yet the last one
                self.reset_all_metrics_and_losses()

        run(Windows(evaluate_every_steps=2, num_epochs=1), tmp_path)
        assert [step for step, _ in recorded["train/mean"]] == [2, 4, 6]
        assert sum(value for _, value in recorded["train/sum"]) == sum(range(12))


class TestTheBestWithinAnEpoch:
    """Checkpoints in the middle of an epoch compete with those at its end, each with the value of its own weights."""

    VALUES = {4: 5.0, 6: 4.0, 8: 1.0, 12: 3.0, 16: 1.5, 18: 2.0}

    class Scored(Experiment):
        def evaluate(self, loader: Any, epoch: int) -> None:
            super().evaluate(loader, epoch)
            self.log({"val/x": TestTheBestWithinAnEpoch.VALUES[self.global_step]})
            if self.every(4):
                self.save_checkpoint(epoch=epoch)

    def saved(self, folder: Path, **settings: Any) -> dict[str, float | None]:
        """Run the loop. Return the value with which each checkpoint was saved, by name."""
        settings = {"evaluate_every_steps": 4, "checkpoint_every_steps": 5, "monitor": "val/x", **settings}
        _, events = run(self.Scored(**settings), folder)
        return {Path(item.path).name: item.metrics.get("val/x") for item in of_type(events, CheckpointSaved)}

    @pytest.mark.parametrize("mode", ["min", "max"])
    @pytest.mark.parametrize("limit", [None, 9])
    def test_the_best_is_kept_beside_the_latest(self, tmp_path: Path, mode: str, limit: int | None) -> None:
        settings: dict[str, Any] = {"mode": mode, "keep_checkpoints": 1}
        if limit is not None:
            self.saved(tmp_path, max_steps=limit, **settings)  # then it is resumed
        self.saved(tmp_path, **settings)
        best = "epoch_0002_step_00000008" if mode == "min" else "epoch_0001_step_00000004"
        assert sorted(path.name for path in tmp_path.rglob("epoch_*")) == [best, "epoch_0003"]


class TestAnEpochEndsOnce:
    """Also if the loop evaluates and saves a checkpoint in its last step, and again after the epoch."""

    class Saving(Experiment):
        def worker_loop(self, dataset_shards: DatasetShards) -> None:
            super().worker_loop(dataset_shards)
            with self.stage("test"):
                super().evaluate(self.generate_loaders(dataset_shards.val), self.cfg.num_epochs - 1)

        def evaluate(self, loader: Any, epoch: int) -> None:
            within = self.every(self.cfg.evaluate_every_steps)
            super().evaluate(loader, epoch)
            if within:
                self.save_checkpoint(epoch=epoch)

    @pytest.mark.parametrize("every", [None, 3, 6])
    def test_whenever_the_loop_evaluates(self, tmp_path: Path, every: int | None) -> None:
        _, events = run(self.Saving(evaluate_every_steps=every), tmp_path)
        ended = of_type(events, EpochEnded)
        assert [item.epoch for item in ended] == [0, 1, 2, 2]
        assert all({"train/mean", "val/mean"} <= item.values.keys() for item in ended[:3])
        assert {name.partition("/")[0] for name in ended[3].values} == {"test"}  # reported at the end of the run


class TestCallbacks:
    class Heard:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_batch_start(self, experiment: BaseModule, stage: str, batch: dict[str, torch.Tensor]) -> None:
            self.calls.append(f"{stage}[{experiment.global_step}")
            batch["x"].zero_()

        def on_batch_end(self, experiment: BaseModule, stage: str, batch: dict[str, torch.Tensor]) -> None:
            assert not batch["x"].any()
            self.calls.append("]")

        def on_update(self, experiment: BaseModule, optimizer: torch.optim.Optimizer) -> None:
            assert optimizer is experiment.optimizers.sgd
            self.calls.append("+" if experiment.models.net[1].weight.grad is not None else "-")

        def on_evaluate_start(self, experiment: BaseModule, stage: str) -> None:
            self.calls.append("(")

        def on_evaluate_end(self, experiment: BaseModule, stage: str) -> None:
            self.calls.append(")")

    def test_they_surround_batches_and_evaluations_and_follow_updates(self, tmp_path: Path) -> None:
        heard = self.Heard()
        settings = {
            "debug": Debug(limit_batches=2),
            "num_epochs": 1,
            "evaluate_every_steps": 2,
        }
        experiment = Experiment(callbacks={"heard": heard, "removed": None}, **settings)
        experiment.optimizers.sgd.register_step_post_hook(lambda one, *_: session_of(experiment).update_finished(one))
        run(experiment, tmp_path)
        assert "".join(heard.calls) == "train[1+]train[2+(val[2]val[2])](val[2]val[2])"


@pytest.mark.local
def test_two_workers_of_the_command(digits: Path, mlx: Mlx) -> None:
    """A run at its limit has succeeded; a higher limit continues it as if it had always been that high."""
    runs = digits / "runs" / "digits"
    settings = ("cfg.evaluate_every_steps=8", "cfg.log_every_steps=5")
    done = mlx(digits, "train", "run", "cfg.max_steps=30", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nfinished  step 30 of cfg.max_steps=30\n" in done.stdout
    rows = [line.split()[0] for line in done.stdout.splitlines() if "/2 " in line]
    assert rows == ["1/2", "2/2"]
    (row,) = json.loads(mlx(digits, "xp", "ls", "--json").stdout)
    assert (row["status"], row["epoch"], row["epochs"]) == ("SUCCEEDED", 2, 2)
    refused = mlx(digits, "train", "run", "--resume", "cfg.num_epochs=8")
    further = "To train further, raise cfg.num_epochs=30 or cfg.max_steps;"
    assert refused.stderr.startswith(f"digits/run_001 has succeeded. {further}")
    for arguments in (("--resume", "cfg.max_steps=35"), ("cfg.max_steps=35", *settings)):
        done = mlx(digits, "train", "run", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    states = [
        torch.load(runs / name / "checkpoints" / "epoch_0002_step_00000035" / "state.pt", weights_only=True)
        for name in ("run_001", "run_002")
    ]
    for one, other in zip(*(state["models"]["net"].values() for state in states), strict=True):
        assert torch.equal(one, other)
    deterministic = [
        {name: value for name, value in state["numbers"]["latest"].items() if name.startswith(("train/", "val/"))}
        for state in states
    ]
    assert len(deterministic[0]) == 8
    assert deterministic[0] == deterministic[1]
    reports = [json.loads(line) for line in (runs / "run_001" / "metrics.jsonl").read_text().splitlines()]
    assert {item["step"] for item in reports if "val/accuracy" in item} >= {8, 16, 24, 32}
