"""The charts of a sweep for Plotly, as plain SVG.

Plotly's own parallel coordinates need WebGL, and scripts that are not allowed in our pages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlx_runtime.companions.sweeps.scores import Trial
from mlx_runtime.companions.views.report import escape
from mlx_runtime.extras import require
from mlx_runtime.runs.tables import format_number

LOG_RATIO = 100
"""Ratio of the largest to the smallest positive number above which an axis is logarithmic."""

MIN_TRIALS = 6
"""Minimum number of finished trials for estimating the importance of parameters."""

MAX_FOLDED = 24
"""Number of best trials whose folds are drawn."""

MAX_MARKED = 10
"""Number of choices above which an axis has the usual ticks."""

MAX_POINTS = 500
"""Number of points in learning curves above which only lines are drawn."""

TEXT_LENGTH = 18
"""Maximum length of a text beside an axis."""

Chart = dict[str, Any]


class Look(NamedTuple):
    """The style of a group of trials; the color is a variable of the page's style sheet."""

    name: str
    color: str
    opacity: float
    width: float


LOOKS = {
    "unfinished": Look("not finished", "--quiet", 0.35, 1),
    "others": Look("others", "--quiet", 0.8, 1.2),
    "quarter": Look("best quarter", "--first", 0.9, 1.6),
    "best": Look("best", "--second", 1, 3),
}
"""From the back to the front."""


class Mark(NamedTuple):
    """A line or a point of a trial."""

    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str]  # shown at each point


class Axis:
    """A parameter or a metric. Numbers are at their position, and other values are evenly spaced in alphabetical order.

    Args:
        key: Full name.
        name: Short name.
        values: One per trial.
        log: True for a logarithmic axis, if all values are positive numbers; None decides by the values.
        chosen: True if the numbers are choices, which are marked on the axis unless there are many.
    """

    def __init__(
        self, key: str, name: str, values: Sequence[Any], log: bool | None = None, *, chosen: bool = False
    ) -> None:
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in values)
        positive = numbers and min(values) > 0
        self.key, self.name = key, escape(name)
        self.log = positive and (max(values) >= LOG_RATIO * min(values) if log is None else log)
        texts = [f"{value:.4g}" if numbers else str(value) for value in values]
        self.choices = [] if numbers else sorted(set(texts))
        self.marked = chosen and len(set(texts)) <= MAX_MARKED
        self.positions: list[float] = [*values] if numbers else [self.choices.index(text) for text in texts]
        self.texts = [escape(text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}…") for text in texts]

    def heights(self) -> list[float]:
        """Return the height of each trial, from 0 for the lowest position to 1 for the highest."""
        scaled = [math.log10(position) if self.log else position for position in self.positions]
        low, high = min(scaled), max(scaled)
        return [(item - low) / (high - low) if high > low else 0.5 for item in scaled]

    def ticks(self, coordinates: Sequence[float]) -> dict[float, str]:
        """Return the texts at some positions of the trials: at choices, or at both ends of other numbers."""
        found = dict(sorted(zip(coordinates, self.texts, strict=True)))
        low, high = min(found), max(found)
        return {x: text for x, text in found.items() if self.choices or self.marked or x in (low, high)}

    def layout(self) -> Chart:
        """Return the axis for Plotly."""
        title = {"text": self.name, "standoff": 4}
        ticks = self.ticks(self.positions)
        marks = {"title": title, "tickvals": [*ticks], "ticktext": [*ticks.values()]}
        if self.choices:
            return marks | {"range": [-0.5, len(ticks) - 0.5]}
        numbers: Chart = {"title": title, "type": "log" if self.log else "linear", "exponentformat": "e"}
        if self.marked:
            return numbers | marks
        value = next(iter(ticks))
        if len(ticks) == 1 and value and not self.log:  # Plotly's axis would extend by 1 on both sides
            numbers["range"] = [value - abs(value) / 2, value + abs(value) / 2]
        return numbers


def parallel(trials: Sequence[Trial], axes: Sequence[Axis]) -> Chart:
    """Draw each trial as a line through its values to its score."""
    heights = [axis.heights() for axis in axes]
    texts = [[f"{axis.name} {text}" for text in axis.texts] for axis in axes]
    marks = [
        Mark(range(len(axes)), own, shown)
        for own, shown in zip(zip(*heights, strict=True), zip(*texts, strict=True), strict=True)
    ]
    note = {"showarrow": False, "xanchor": "left", "xshift": 3, "bgcolor": "--card", "opacity": 0.85}
    notes = [
        note | {"x": x, "y": at, "text": text}
        for x, axis in enumerate(axes)
        for at, text in axis.ticks(heights[x]).items()
    ]
    names = {"tickvals": [*range(len(axes))], "ticktext": [axis.name for axis in axes], "title": None}
    layout = {"height": 360, "annotations": notes, "yaxis": {"visible": False, "range": [-0.06, 1.06]}}
    layout |= {"xaxis": names | {"range": [-0.05, len(axes) - 0.95]}, "margin": {"l": 16, "r": 60, "t": 8, "b": 36}}
    return {"title": f"{len(trials)} trials", "traces": _traces(trials, marks, "lines"), "layout": layout}


def against(trials: Sequence[Trial], axis: Axis, scores: Axis) -> Chart:
    """Draw the score of each trial over one parameter."""
    columns = (axis.positions, axis.texts, scores.positions, scores.texts)
    marks = [Mark([x], [y], [f"{text}: {score}"]) for x, text, y, score in zip(*columns, strict=True)]
    layout = {"xaxis": axis.layout(), "yaxis": scores.layout()}
    return {"title": axis.key, "traces": _traces(trials, marks, "markers"), "layout": layout}


def importance(trials: Sequence[Trial], axes: Sequence[Axis]) -> list[Chart]:
    """Draw the share of each parameter in the variance of the score; return [] if there are too few trials."""
    finished = [index for index, trial in enumerate(trials) if trial.status == "SUCCEEDED"]
    axes = [axis for axis in axes if len({axis.positions[index] for index in finished}) > 1]
    if len(finished) < MIN_TRIALS or not axes:
        return []
    shares = _shares({index: trials[index].score or 0.0 for index in finished}, axes)
    axes = sorted(axes, key=lambda axis: shares[axis.key])
    bars: Chart = {
        "type": "bar",
        "orientation": "h",
        "x": [shares[axis.key] for axis in axes],
        "y": [*range(len(axes))],
        "marker": {"color": "--first"},
        "hovertemplate": "%{x:.0%}<extra></extra>",
    }
    across = {"tickformat": ".0%", "rangemode": "tozero", "title": None}
    down = {"tickvals": bars["y"], "ticktext": [axis.name for axis in axes]}
    layout = {"height": max(260, 80 + 24 * len(axes)), "showlegend": False, "xaxis": across, "yaxis": down}
    return [{"title": f"share of the variance over {len(finished)} trials", "traces": [bars], "layout": layout}]


def _shares(scores: Mapping[int, float], axes: Sequence[Axis]) -> dict[str, float]:
    """Analyze the variance of the scores of some trials with fANOVA (Hutter, Hoos and Leyton-Brown, 2014)."""
    require("optuna", "the importance of parameters in a report")
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    def distribution(axis: Axis) -> BaseDistribution:
        if axis.choices:
            return CategoricalDistribution(range(len(axis.choices)))
        return FloatDistribution(min(axis.positions), max(axis.positions), log=axis.log)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    distributions = {axis.key: distribution(axis) for axis in axes}
    for index, score in scores.items():
        values = {axis.key: axis.positions[index] for axis in axes}
        study.add_trial(optuna.create_trial(params=values, distributions=distributions, value=score))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def curves(metric: str, trials: Sequence[Trial]) -> Chart:
    """Draw the metric of each trial by epoch."""
    marks = [
        Mark([*curve], [*curve.values()], [f"{value:.4g} in epoch {epoch}" for epoch, value in curve.items()])
        for curve in (trial.curve for trial in trials)
    ]
    mode = "lines" if sum(len(mark.x) for mark in marks) > MAX_POINTS else "lines+markers"
    values = Axis(metric, metric, [value for mark in marks for value in mark.y if math.isfinite(value)])
    epochs = max(epoch for mark in marks for epoch in mark.x)
    across = {"title": {"text": "epoch", "standoff": 4}, "tick0": 1, "dtick": math.ceil(epochs / 10)}
    layout = {"height": 360, "xaxis": across, "yaxis": values.layout()}
    return {"title": metric, "traces": _traces(trials, marks, mode), "layout": layout}


def folds(metric: str, trials: Sequence[Trial]) -> Chart:
    """Draw the metric of each fold of the best trials at their best epochs, with mean and standard deviation."""
    trials = trials[:MAX_FOLDED]
    each = []
    for x, trial in enumerate(trials):
        values = {run.fold: run.epochs[trial.epoch or 0][metric] for run in trial.runs}
        texts = [f"fold {(fold or 0) + 1}: {value:.4g}" for fold, value in values.items()]
        each.append(Mark([x + 0.1] * len(values), [*values.values()], texts))
    means = [Mark([x], [trial.metrics[metric]], [spread_text(trial, metric)]) for x, trial in enumerate(trials)]
    drawn = _trace(Look("mean ± standard deviation", "--first", 1, 2), trials, means, "markers")
    spread = [item for trial in trials for item in (trial.spread[metric], None)]
    drawn["error_y"] = {"type": "data", "array": spread, "color": "--first", "thickness": 2, "width": 6}
    across: Chart = {"tickvals": [*range(len(trials))], "ticktext": [str(trial.number) for trial in trials]}
    across |= {"title": {"text": "trial, best first", "standoff": 4}, "range": [-0.5, len(trials) - 0.5]}
    traces = [_trace(Look("fold", "--quiet", 0.8, 1), trials, each, "markers"), drawn]
    return {"title": metric, "traces": traces, "layout": {"height": 320, "xaxis": across}}


def spread_text(trial: Trial, metric: str) -> str:
    """Return a metric of a trial, with its standard deviation over folds."""
    value = format_number(trial.metrics.get(metric))
    return f"{value} ± {format_number(trial.spread[metric])}" if metric in trial.spread else value


def _traces(trials: Sequence[Trial], marks: Sequence[Mark], mode: str) -> list[Chart]:
    """Draw trials, best first, each with its mark, in groups from the back to the front."""
    finished = [trial.number for trial in trials if trial.status == "SUCCEEDED"]
    quarter = finished[: math.ceil(len(finished) / 4)]

    def kind(trial: Trial) -> str:
        if trial is trials[0]:
            return "best"
        if trial.status != "SUCCEEDED":
            return "unfinished"
        return "quarter" if trial.number in quarter else "others"

    groups: Mapping[str, list[int]] = {name: [] for name in LOOKS}
    for index, trial in enumerate(trials):
        groups[kind(trial)].append(index)
    return [
        _trace(LOOKS[name], [trials[index] for index in group], [marks[index] for index in group], mode)
        for name, group in groups.items()
        if group
    ]


def _trace(look: Look, trials: Sequence[Trial], marks: Sequence[Mark], mode: str) -> Chart:
    """Draw the marks of trials as one trace with gaps, because Plotly is slow with many traces."""
    return {
        "type": "scatter",
        "mode": mode,
        "name": look.name,
        "opacity": look.opacity,
        "line": {"color": look.color, "width": look.width},
        "marker": {"color": look.color, "size": 4 + 2 * look.width},
        "x": [x for mark in marks for x in (*mark.x, None)],
        "y": [y for mark in marks for y in (*mark.y, None)],
        "text": [text for mark in marks for text in (*mark.texts, "")],
        "customdata": [trial.number for trial, mark in zip(trials, marks, strict=True) for _ in (*mark.x, None)],
        "hovertemplate": "%{text}<extra>trial %{customdata}</extra>",
    }
