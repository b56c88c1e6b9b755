"""Metrics over several workers have the value of a single worker with all rows, after one message."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import groups
import pytest
import torch
import torchmetrics as tm
from forkserver import Commands
from sessions import attach
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric, MetricCollection

from mlx_runtime import BaseModule, TrainConfig
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.metric_recording import MetricSync, SyncMessage
from mlx_runtime.runs.metric_states import (
    Snapshot,
    compute_from,
    merge_snapshots,
    numbers,
    snapshot,
)

pytestmark = pytest.mark.pure

WORLD = 2


def made() -> dict[str, Metric | MetricCollection]:
    return {
        "mse": tm.MeanSquaredError(),
        "mean": tm.MeanMetric(),
        "top": tm.MaxMetric(),
        "low": tm.MinMetric(),
        "pearson": tm.PearsonCorrCoef(),
        "accuracy": tm.classification.MulticlassAccuracy(5),
        "auroc": tm.classification.BinaryAUROC(),
        "cat": tm.CatMetric(),
        "range": tm.MinMaxMetric(tm.MeanMetric()),
        "both": tm.MeanMetric() + tm.SumMetric(),
        "group": MetricCollection(
            [tm.classification.MulticlassAccuracy(5), tm.classification.MulticlassPrecision(5), tm.CatMetric()]
        ),
    }


def see(metrics: dict[str, Metric | MetricCollection], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, generator=random), torch.randn(8, generator=random)
    logits, labels = torch.randn(8, 5, generator=random), torch.randint(5, (8,), generator=random)
    for name in ("mean", "top", "low", "cat", "range", "both"):
        metrics[name].update(x)
    for name in ("mse", "pearson"):
        metrics[name].update(x, y)
    metrics["accuracy"].update(logits, labels)
    metrics["auroc"].update(x.sigmoid(), (y > 0).long())
    metrics["group"].update(preds=logits, target=labels, value=x)


def states_of(metrics: dict[str, Metric | MetricCollection]) -> dict[str, Snapshot]:
    return {name: snapshot(metric) for name, metric in metrics.items()}


def value_of(metric: Any, name: str, states: list[Snapshot]) -> dict[str, float] | None:
    """Return the value over all workers, or None if the metric has seen no data."""
    merged = merge_snapshots(name, metric, states)
    return None if merged is None else numbers(name, compute_from(metric, merged))


@pytest.fixture(scope="module")
def on_workers(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each of `WORKS` on each of two processes, by name. Each had a separate gloo group."""
    return groups.on_workers(commands, WORKS, tmp_path_factory.mktemp("workers"), WORLD)


def topology(rank: int) -> Topology:
    return Topology(rank, WORLD, torch.device("cpu"))


def _values(rank: int) -> dict[str, object]:
    warnings.simplefilter("ignore")
    metrics, sync = made(), MetricSync(topology(rank))
    for step in range(6):
        if step % WORLD == rank:
            see(metrics, step)
    before = {name: copy.deepcopy(metric.metric_state) for name, metric in metrics.items()}
    found: dict[str, object] = {}
    for part in ("a first time", "again"):  # a message that did not fit at first fits the next time
        sync.send(SyncMessage(("train", 3), frozenset({"metrics"}), (float(rank),), states_of(metrics)))
        heard = sync.receive()
        assert [item.numbers for item in heard] == [(0.0,), (1.0,)]
        if rank == 0:
            found[part] = {
                name: value_of(metric, name, [item.snapshots[name] for item in heard])
                for name, metric in metrics.items()
            }
    alike = {name: str(before[name]) == str(metric.metric_state) for name, metric in metrics.items()}
    return {"values": found, "unchanged": alike}


@pytest.mark.process
def test_values_are_those_of_one_worker(on_workers: dict[str, list[Any]]) -> None:
    first, second = on_workers["values"]
    alone = made()
    for step in range(6):
        see(alone, step)
    assert all(first["unchanged"].values())
    assert second["values"] == {}
    for found in first["values"].values():
        assert found.keys() == alone.keys()
        for name, metric in alone.items():
            expected = numbers(name, metric.compute())
            assert found[name].keys() == expected.keys()
            for key, value in expected.items():
                assert found[name][key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


class Teacher:
    def __init__(self) -> None:
        self.net = nn.BatchNorm1d(2)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()


class Statistics(nn.BatchNorm1d):
    per_worker = True


def _evaluating(rank: int) -> list[float]:
    """Statistics that each worker has computed itself, as an evaluation uses them."""
    module = BaseModule(cfg=TrainConfig(), models=SimpleNamespace(net=nn.BatchNorm1d(2)))
    module.tools = SimpleNamespace(teacher=Teacher(), norm=nn.BatchNorm1d(2), own=Statistics(2))
    module.average = AveragedModel(module.models.net, use_buffers=True)  # type: ignore[attr-defined]
    if rank == 0:
        module.alone = nn.BatchNorm1d(2)  # type: ignore[attr-defined]
    tools, average = module.tools, module.average.module  # type: ignore[attr-defined]
    norms = [module.models.net, average, tools.teacher.net, tools.norm, tools.own]
    for norm in norms:
        norm.running_mean.fill_(rank + 1)
    attach(module, Path("unused"), topology=topology(rank))
    with module.evaluation():
        return [norm.running_mean.mean().item() for norm in norms]


@pytest.mark.process
def test_all_workers_evaluate_with_the_statistics_of_rank_0(on_workers: dict[str, list[Any]]) -> None:
    assert on_workers["evaluating"] == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 2]]


WORKS: dict[str, groups.Work] = {
    "evaluating": _evaluating,
    "values": _values,
}
"""The functions that run on two workers, in one group, because starting a group takes seconds."""


def test_one_that_was_not_updated_has_no_value() -> None:
    metrics = {"mean": tm.MeanMetric(), "group": MetricCollection([tm.MeanMetric()])}
    states = states_of(metrics)
    assert [value_of(metric, name, [states[name]]) for name, metric in metrics.items()] == [None, None]
    metrics["mean"].update(1.0)
    with pytest.raises(MlxError, match="train/mean was updated on some workers only"):
        value_of(metrics["mean"], "train/mean", [states["mean"], states_of(metrics)["mean"]])
