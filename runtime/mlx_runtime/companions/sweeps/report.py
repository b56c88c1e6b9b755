"""The web page of a sweep: a single file that can be opened offline, like the pages of runs, with charts by Optuna."""

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.scores import Trial, short_names
from mlx_runtime.companions.views.report import escape, known_facts, render
from mlx_runtime.errors import MissingLibraryError
from mlx_runtime.extras import require
from mlx_runtime.runs.queries.listing import AskJobs, summarize
from mlx_runtime.runs.tables import format_duration

PAGE = Path(__file__).parent / "pages" / "sweep.html"

LOG_RATIO = 100
"""Ratio of the largest to the smallest positive number above which an axis is logarithmic."""

EXACT = 2**53
"""Magnitude up to which a float holds every integer; Optuna computes with floats."""

MIN_TRIALS = 6
"""Minimum number of finished trials for estimating the importance of parameters."""

Chart = dict[str, Any]
"""A title, and a figure of Plotly as plain values."""


def render_sweep(result: SweepResult, ask: AskJobs | None = None) -> str:
    """Render the page of a sweep: facts, charts, and a table of all trials, best first."""
    [row] = summarize([result.folder], ask)
    ranked = result.ranked()
    shown = [trial for trial in ranked if trial.score is not None and trial.status != "FAILED"]
    require("plotly", "a report")
    sections, lacking = dict[str, list[Chart]](), ""
    try:
        sections = draw(shown, result.metric, result.mode) if shown else {}
    except MissingLibraryError as error:
        lacking = str(error)
    return render(
        PAGE,
        charts=[chart for drawn in sections.values() for chart in drawn],
        title=result.folder.title,
        row=row,
        facts=_facts(result, shown) | known_facts(row),
        sections=sections,
        lacking=lacking,
        has_best=bool(shown),
        table=_table(result, ranked),
        errors={trial.number: trial.error for trial in ranked if trial.error},
    )


def _facts(result: SweepResult, shown: Sequence[Trial]) -> dict[str, str]:
    statuses = collections.Counter(trial.status for trial in result.trials)
    facts = {
        "trials": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "search": f"{result.definition['search']}, scheduler {result.definition['scheduler']}",
        "metric": f"{result.metric} ({result.mode})",
        "seeds": str(result.definition.get("seeds") or ""),
        "folds": str(result.folds or ""),
    }
    if shown:
        facts["best"] = f"{shown[0].shown[result.metric]} in trial {shown[0].number}, epoch {shown[0].epoch}"
        facts["its values"] = " ".join(shown[0].overrides)
        facts["full run"] = result.command
    elif any(trial.curve for trial in result.trials):
        facts["best"] = f"none: no trial has a finite value of {result.metric}"
    return {name: text for name, text in facts.items() if text}


def _table(result: SweepResult, ranked: Sequence[Trial]) -> list[dict[str, str]]:
    names = short_names([*ranked[0].values]) if ranked else {}
    rows = []
    for trial in ranked:
        values, shown = trial.values, trial.shown
        row = {"trial": str(trial.number), "status": trial.status}
        row |= {name: str(values.get(key, "")) for key, name in names.items()}
        row |= {"epoch": str(trial.epoch or ""), result.metric: shown.get(result.metric, "")}
        row |= {"took": format_duration(trial.duration_s)}
        row |= {"runs": ", ".join(folder.folder.name for folder, _ in trial.started)}
        rows.append(row | {name: shown.get(name, "") for name in result.metric_names if name != result.metric})
    return rows


def draw(trials: Sequence[Trial], metric: str, mode: str) -> dict[str, list[Chart]]:
    """Draw the trials that have a score. Return the charts of each section by its title.

    Raises:
        MissingLibraryError: Optuna or scikit-learn is not installed; a plain grid needs neither.
    """
    for library in ("optuna", "sklearn"):
        require(library, "drawing the charts of a sweep")
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
    """Return values of a parameter if all of them are numbers that a float holds exactly, otherwise their texts."""
    numbers = all(type(value) in (int, float) and abs(value) <= EXACT for value in values)
    return values if numbers else [escape(str(value)) for value in values]


def _distribution(values: Sequence[Any]) -> Any:
    """Return Optuna's distribution of numbers or texts."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if type(values[0]) is str:
        return CategoricalDistribution(sorted(set(values)))
    low, high = min(values), max(values)
    kind = IntDistribution if all(type(value) is int for value in values) else FloatDistribution
    return kind(low, high, log=0 < low <= high / LOG_RATIO)
