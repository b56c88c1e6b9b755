"""States of metrics are merged and computed without changing the metric, wherever it stores them."""

import copy

import pytest
import torch
import torchmetrics as tm
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MultitaskWrapper

from mlx_runtime.runs.metric_states import compute_from, is_mergeable, load_state, merge_states, state_of

pytestmark = pytest.mark.pure


def of_classes() -> tm.classification.MulticlassAccuracy:
    return tm.classification.MulticlassAccuracy(3, average=None)


class Mean(Metric):
    """The mean of the means of workers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros((), dtype=dtype), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.mean += (value - self.mean) / self._update_count

    def compute(self) -> torch.Tensor:
        return self.mean


@pytest.mark.parametrize(
    ("metric", "seen"),
    [
        (ClasswiseWrapper(of_classes()), (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))),
        (MultitaskWrapper({"a": tm.MeanMetric()}), ({"a": torch.ones(2)}, {"a": torch.ones(2)})),
        (MetricCollection({"a": tm.MeanMetric(), "b": MetricCollection([tm.SumMetric()])}), (torch.ones(3),)),
        (tm.MeanMetric() / tm.SumMetric(), (torch.full((3,), 2.0),)),
    ],
    ids=["classwise", "multitask", "collection", "composition"],
)
def test_metrics_within_metrics(metric: Metric, seen: tuple) -> None:
    if isinstance(metric, MultitaskWrapper):
        metric.task_metrics["a"].update(torch.ones(2))
    else:
        metric.update(*seen)
    state = copy.deepcopy(state_of(metric))
    expected = str(metric.compute())
    metric.reset()
    before = str(state_of(metric))
    assert str(compute_from(metric, state)) == expected
    assert str(state_of(metric)) == before
    load_state(metric, state)
    assert str(metric.compute()) == expected


def test_a_list_of_metrics_is_not_shared() -> None:
    metric = BootStrapper(tm.MeanMetric(), num_bootstraps=3, raw=True)
    metric.update(torch.arange(8.0))
    state = copy.deepcopy(state_of(metric))
    expected = metric.compute()["raw"].tolist()
    metric.update(torch.full((8,), 100.0))
    assert compute_from(metric, state)["raw"].tolist() == expected


def test_a_mean_is_weighted_by_updates() -> None:
    workers, alone = (Mean(), Mean()), Mean()
    for metric, values in zip(workers, ([1.0, 2.0, 3.0], [10.0]), strict=True):
        for value in values:
            metric.update(value)
            alone.update(value)
    merged = merge_states(workers[0], [state_of(metric) for metric in workers])
    assert compute_from(workers[0], merged) == alone.compute() == 4.0
    assert merged[""]["updates"] == 4
    assert (is_mergeable(Mean()), is_mergeable(Mean(torch.int64))) == (True, False)  # the mean of integers is none
