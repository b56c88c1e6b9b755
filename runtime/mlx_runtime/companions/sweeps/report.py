"""The web page of a sweep: a single file that can be opened offline, like the pages of runs."""

import collections
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.companions.sweeps import charts
from mlx_runtime.companions.sweeps.charts import Axis, Chart, spread_text
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.scores import Trial, short_names
from mlx_runtime.companions.views.report import known_facts, render
from mlx_runtime.runs.queries.listing import AskJobs, summarize
from mlx_runtime.runs.tables import format_duration

PAGE = Path(__file__).parent / "pages" / "sweep.html"


def render_sweep(result: SweepResult, ask: AskJobs | None = None) -> str:
    """Render the page of a sweep: facts, charts, and a table of all trials, best first."""
    [row] = summarize([result.folder], ask)
    ranked = result.ranked()
    shown = [trial for trial in ranked if trial.score is not None and trial.status != "FAILED"]
    sections = _sections(result, shown) if shown else []
    return render(
        PAGE,
        charts=[chart for section in sections for chart in section["charts"]],
        title=result.folder.title,
        row=row,
        facts=_facts(result, shown) | known_facts(row),
        sections=sections,
        table=_table(result, ranked),
        errors={trial.number: trial.error for trial in ranked if trial.error},
    )


def _sections(result: SweepResult, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    metric = result.metric
    scores = Axis(metric, metric, [trial.score for trial in trials])
    axes = _parameters(result, trials)
    few = f"The estimate needs {charts.MIN_TRIALS} finished trials, and parameters that differ between them."
    sections = [_section("Folds", [charts.folds(metric, trials)])] if result.folds else []
    if axes:
        sections += [
            _section("Parallel coordinates", [charts.parallel(trials, [*axes, scores])]),
            _section("Parameters", [charts.against(trials, axis, scores) for axis in axes], narrow=True),
            _section("Importance of parameters", charts.importance(trials, axes), few),
        ]
    return [*sections, _section("Learning curves", [charts.curves(metric, trials)])]


def _section(title: str, found: Sequence[Chart], missing: str = "", *, narrow: bool = False) -> dict[str, Any]:
    return {"title": title, "charts": found, "missing": missing, "narrow": narrow}


def _parameters(result: SweepResult, trials: Sequence[Trial]) -> list[Axis]:
    """Return the axes of the parameters that differ between trials."""
    # The parser of overrides would import torch.
    typed = {text.partition("=")[0]: text for text in result.definition["overrides"] if "interval(" in text}
    logarithmic = {key: bool(re.search(r"\btag\(\s*log\b", text)) for key, text in typed.items()}
    names = short_names(list(dict.fromkeys(key for trial in trials for key in trial.values)))
    axes = [
        Axis(key, name, [trial.values.get(key) for trial in trials], logarithmic.get(key), chosen=key not in typed)
        for key, name in names.items()
    ]
    return [axis for axis in axes if len(set(axis.positions)) > 1]


def _facts(result: SweepResult, shown: Sequence[Trial]) -> dict[str, str]:
    statuses = collections.Counter(trial.status for trial in result.trials)
    facts = {
        "trials": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "search": f"{result.definition['search']}, scheduler {result.definition['scheduler']}",
        "metric": f"{result.metric} ({result.mode})",
        "folds": str(result.folds or ""),
    }
    if shown:
        facts["best"] = f"{spread_text(shown[0], result.metric)} in trial {shown[0].number}, epoch {shown[0].epoch}"
        facts["its values"] = " ".join(shown[0].overrides)
        facts["full run"] = result.command
    elif any(trial.curve for trial in result.trials):
        facts["best"] = f"none: no trial has a finite value of {result.metric}"
    return {name: text for name, text in facts.items() if text}


def _table(result: SweepResult, ranked: Sequence[Trial]) -> list[dict[str, str]]:
    names = short_names([*ranked[0].values]) if ranked else {}
    return [
        {
            "trial": str(trial.number),
            "status": trial.status,
            **{name: str(trial.values.get(key, "")) for key, name in names.items()},
            "epoch": str(trial.epoch or ""),
            result.metric: spread_text(trial, result.metric),
            "took": format_duration(trial.duration_s),
            "runs": ", ".join(run.row.folder.name for run in trial.runs),
            **{name: spread_text(trial, name) for name in result.metric_names if name != result.metric},
        }
        for trial in ranked
    ]
