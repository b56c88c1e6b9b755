"""The web page of a sweep: a single file that can be opened offline, like the pages of runs."""

import collections
from collections.abc import Sequence
from pathlib import Path

from mlx_runtime.companions.sweeps import charts
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
    sections = charts.sections(shown, result.metric, result.mode) if shown else {}
    return render(
        PAGE,
        charts=[chart for drawn in sections.values() for chart in drawn],
        title=result.folder.title,
        row=row,
        facts=_facts(result, shown) | known_facts(row),
        sections=sections,
        table=_table(result, ranked),
        errors={trial.number: trial.error for trial in ranked if trial.error},
    )


def _facts(result: SweepResult, shown: Sequence[Trial]) -> dict[str, str]:
    statuses = collections.Counter(trial.status for trial in result.trials)
    facts = {
        "trials": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "search": f"{result.definition['search']}, scheduler {result.definition['scheduler']}",
        "metric": f"{result.metric} ({result.mode})",
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
