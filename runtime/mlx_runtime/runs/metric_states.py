"""States of TorchMetrics objects: copying, restoring, merging over workers, and computing without changing the metric.

All uses of private attributes of TorchMetrics are in this module.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from mlx_runtime.errors import ConfigError, MlxError

AnyMetric = Metric | MetricCollection

State = dict[str, dict[str, Any]]
"""`{"states": {name: value}, "updates": count}` for each metric within a metric, by path; `""` is the metric itself."""

Snapshot = State | None
"""A copy of a metric's state on the CPU; None if the metric has seen no data."""

UPDATED_ON_SOME = "{} was updated on some workers only; update it on every worker, or its value cannot be computed"

_RESTORABLE = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)


def metric_parts(metric: AnyMetric) -> dict[str, Metric]:
    """Return the metric and all metrics within it, by path."""
    if isinstance(metric, Metric) and not metric._modules:  # fast path, because metrics are recorded often
        return {"": metric}
    return {path: part for path, part in metric.named_modules() if isinstance(part, Metric)}


def check_metric(title: str, member: Any) -> None:
    """Let each metric of a collection count by itself, and refuse metrics that would not be recorded.

    By default, TorchMetrics merges the members of a collection whose states are equal after the first batch of a
    process, which other workers and resumed runs may not have seen. Groups stated by the user are kept.

    Raises:
        ConfigError: members are already merged, or metrics are in a list or dict.
    """
    if not is_metric(member):
        if _holds_metrics(member):
            raise ConfigError(
                f"{title} is a {type(member).__name__}, whose metrics are not recorded; use "
                "MetricCollection({name: metric, ...}), or Tools for metrics that you log yourself"
            )
        return
    for part in member.modules():
        if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
            if merged := [group for group in part._groups.values() if len(group) > 1]:
                raise ConfigError(
                    f"{title} has merged {' and '.join(merged[0])}, which were equal in the first batch; create it "
                    "with compute_groups=False"
                )
            part._enable_compute_groups, part._groups = False, {}


def _holds_metrics(item: Any) -> bool:
    if isinstance(item, dict | nn.ModuleDict):
        item = list(item.values())
    return is_metric(item) or (isinstance(item, list | tuple | nn.ModuleList) and any(map(_holds_metrics, item)))


def keeps_rows(metric: AnyMetric) -> bool:
    """Return True if the state grows with each row, as for AUROC."""
    return any(isinstance(item, list) for part in metric_parts(metric).values() for item in part._defaults.values())


def syncs_itself(metric: AnyMetric) -> bool:
    """Return True if the metric implements its own synchronization, or is configured to do so."""
    return any(
        part.dist_sync_fn is not None
        or part.process_group is not None
        or not part.sync_on_compute
        or (type(part)._sync_dist is not Metric._sync_dist and part._reductions)
        for part in metric_parts(metric).values()
    )


def is_updated(metric: AnyMetric) -> bool:
    """Return True if the metric, or every member of a collection, has been updated."""
    if isinstance(metric, MetricCollection):
        return all(map(is_updated, metric.values()))
    return any(part.update_called for part in metric_parts(metric).values())


def state_of(metric: AnyMetric) -> State:
    """Return the state. Tensors are not copied, but lists of them are."""
    if isinstance(metric, MetricCollection):
        list(metric.values())  # updates the states of all members of a compute group
    return {
        path: {"states": {name: _value(part, name) for name in part._reductions}, "updates": part._update_count}
        for path, part in metric_parts(metric).items()
    }


def _value(metric: Metric, name: str) -> Any:
    value = getattr(metric, name)
    return [*value] if isinstance(value, list) else value  # TorchMetrics empties lists in place


def snapshot(metric: AnyMetric) -> Snapshot:
    """Return a copy of the state, which further updates do not change."""
    if not is_updated(metric):
        return None
    state = state_of(metric)
    for part in state.values():
        part["states"] = {name: _copy(value) for name, value in part["states"].items()}
    return state


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()


def load_state(metric: AnyMetric, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore a state, or raise ValueError or KeyError if it belongs to a metric with other parts."""
    parts = metric_parts(metric)
    if set(parts) != set(state):
        raise ValueError(f"saved with the parts {', '.join(sorted(state))}; it has {', '.join(sorted(parts))}")
    for path, part in parts.items():
        part.reset()
        for name, value in state[path]["states"].items():
            if name not in part._defaults:
                raise KeyError(name)
            setattr(part, name, _on(copy.deepcopy(value), part.device))
        part._update_count = state[path]["updates"]


def merge_states(metric: AnyMetric, states: Sequence[State]) -> State:
    """Merge the states of several workers with the metric's own reductions."""
    merged: State = {}
    for path, part in metric_parts(metric).items():
        updates = [state[path]["updates"] for state in states]
        values = {
            name: _merge([state[path]["states"][name] for state in states], reduction, updates)
            for name, reduction in part._reductions.items()
        }
        merged[path] = {"states": values, "updates": sum(updates)}
    return merged


def merge_snapshots(title: str, metric: AnyMetric, snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the state over all workers; None if none of them has updated the metric.

    Raises:
        MlxError: only some of them have.
    """
    states = [item for item in snapshots if item is not None]
    if states and len(states) < len(snapshots):
        raise MlxError(UPDATED_ON_SOME.format(title))
    return merge_states(metric, states) if states else None


def is_average(metric: AnyMetric) -> bool:
    """Return True if the state consists of single numbers that are summed, as for a mean."""
    parts = metric_parts(metric).values()
    sums = [(part._defaults[name], reduction) for part in parts for name, reduction in part._reductions.items()]
    return bool(sums) and all(
        isinstance(default, torch.Tensor) and default.numel() == 1 and reduction is dim_zero_sum
        for default, reduction in sums
    )


def state_since(now: State, before: State | None) -> State:
    """Return the difference between the state of an average and an earlier one; the whole state after a reset."""
    if before is None or any(part["updates"] <= before[path]["updates"] for path, part in now.items()):
        return now
    made: State = {}
    for path, part in now.items():
        old = before[path]["states"]
        states = {name: value - old[name] for name, value in part["states"].items()}
        made[path] = {"states": states, "updates": part["updates"] - before[path]["updates"]}
    return made


def is_mergeable(metric: AnyMetric) -> bool:
    """Return True if a merged state can be used as the state of one worker and updated further."""
    return all(
        isinstance(default := part._defaults[name], list)
        or (reduction in _RESTORABLE and (reduction is not dim_zero_mean or default.is_floating_point()))
        for part in metric_parts(metric).values()
        for name, reduction in part._reductions.items()
    )


def compute_from(metric: AnyMetric, state: State) -> Any:
    """Return the value of a metric for a state, without changing the metric and without communication."""
    return _stand_in(metric, state, "").compute()


def numbers(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in a result of `compute` by name, without arrays."""
    named = {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return {key: float(item) for key, item in named.items() if torch.as_tensor(item).numel() == 1}


def _stand_in(metric: Any, state: State, path: str) -> Any:
    """Return an object that shares everything with a metric but its state.

    It uses the methods of the class, because TorchMetrics replaces those of each object with ones that cache and
    synchronize.
    """
    made = object.__new__(type(metric))
    prefix = f"{path}." if path else ""
    shared = {name: value for name, value in vars(metric).items() if name not in ("compute", "update")}
    modules = dict(metric._modules)
    for name, module in modules.items():
        if module is not None and any(isinstance(item, Metric) for item in module.modules()):
            modules[name] = _stand_in(module, state, f"{prefix}{name}")
    vars(made).update(shared, _modules=modules)
    if path in state and isinstance(metric, Metric):
        for name, value in state[path]["states"].items():
            cat = isinstance(value, list) and value and metric._reductions[name] is dim_zero_cat
            vars(made)[name] = _on(dim_zero_cat(value) if cat else value, metric.device)
        vars(made).update(_computed=None, _update_count=state[path]["updates"])
    return made


def _merge(values: Sequence[Any], reduction: Any, updates: Sequence[int]) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1:
        return values[0]
    if reduction is dim_zero_cat:
        return torch.cat([value.reshape(-1) if value.ndim == 0 else value for value in values])
    if reduction is dim_zero_sum:
        return sum(values[1:], values[0])
    total = sum(updates)
    if reduction is dim_zero_mean and total:
        return sum(value * count for value, count in zip(values, updates, strict=True)) / total
    stacked = torch.stack(tuple(values))
    return stacked if reduction is None else reduction(stacked)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def is_metric(item: Any) -> bool:
    """Return True for metrics and collections of them."""
    return isinstance(item, AnyMetric)
