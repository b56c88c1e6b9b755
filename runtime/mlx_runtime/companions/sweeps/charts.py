"""The charts of a sweep, by Optuna."""

import json
import math
from collections.abc import Sequence
from typing import Any

from mlx_runtime.companions.sweeps.scores import Trial, short_names
from mlx_runtime.companions.views.report import escape
from mlx_runtime.extras import require

LOG_RATIO = 100
"""Ratio of the largest to the smallest positive number above which an axis is logarithmic."""

MIN_TRIALS = 6
"""Minimum number of finished trials for estimating the importance of parameters."""

Chart = dict[str, Any]
"""A title, and a figure of Plotly as plain values."""


def sections(trials: Sequence[Trial], metric: str, mode: str) -> dict[str, list[Chart]]:
    """Draw the trials that have a score. Return the charts of each section by its title."""
    require("optuna", "the report of a sweep")
    require("plotly", "a report")
    from optuna import visualization
    from optuna.importance import FanovaImportanceEvaluator

    names = {key: escape(name) for key, name in short_names([*trials[0].values]).items()}
    columns = {name: _numbers([trial.values.get(key) for trial in trials]) for key, name in names.items()}
    columns = {name: values for name, values in columns.items() if len(set(values)) > 1}
    study, title = _study(trials, columns, mode), escape(metric)
    finished = [trial.score for trial in trials if trial.status == "SUCCEEDED"]
    found = {}
    if columns and finished:
        lines = visualization.plot_parallel_coordinate(study, target_name=title)
        found["Parallel coordinates"] = [_chart(f"{len(finished)} finished trials", lines)]
        found["Parameters"] = [
            _chart(key, visualization.plot_slice(study, [name], target_name=title))
            for key, name in names.items()
            if name in columns
        ]
    if columns and len(finished) >= MIN_TRIALS and len(set(finished)) > 1:
        shares = visualization.plot_param_importances(study, FanovaImportanceEvaluator(seed=0))
        found["Importance of parameters"] = [_chart("share of the variance", shares)]
    curves = visualization.plot_intermediate_values(study)
    curves.update_layout(xaxis_title="epoch", yaxis_title=title)
    return found | {"Learning curves": [_chart(metric, curves)]}


def _chart(title: str, figure: Any) -> Chart:
    """Return a figure without its title and its colors of backgrounds and texts, which are those of the page."""
    drawn = json.loads(figure.to_json())
    for name in ("template", "title", "plot_bgcolor"):
        drawn["layout"].pop(name, None)
    return {"title": title, "figure": drawn}


def _study(trials: Sequence[Trial], columns: dict[str, list[Any]], mode: str) -> Any:
    """Return a study of Optuna whose trials have the same numbers."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
    distributions = {name: _distribution(values) for name, values in columns.items()}
    rows = {trial.number: (index, trial) for index, trial in enumerate(trials)}
    for number in range(max(rows) + 1):
        if number not in rows:  # it is not drawn
            study.add_trial(optuna.create_trial(state=TrialState.FAIL))
            continue
        index, trial = rows[number]
        done = trial.status == "SUCCEEDED"
        study.add_trial(
            optuna.create_trial(
                state=TrialState.COMPLETE if done else TrialState.PRUNED,
                value=trial.score if done else None,
                params={name: values[index] for name, values in columns.items()},
                distributions=distributions,
                intermediate_values=dict(trial.curve),
            )
        )
    return study


def _numbers(values: list[Any]) -> list[Any]:
    """Return values of a parameter if all of them are finite numbers, otherwise their texts."""
    numbers = all(type(value) in (int, float) and math.isfinite(value) for value in values)
    return values if numbers else [escape(str(value)) for value in values]


def _distribution(values: Sequence[Any]) -> Any:
    """Return Optuna's distribution of numbers or texts."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if type(values[0]) is str:
        return CategoricalDistribution(sorted(set(values)))
    low, high = min(values), max(values)
    kind = IntDistribution if all(type(value) is int for value in values) else FloatDistribution
    return kind(low, high, log=0 < low <= high / LOG_RATIO)
