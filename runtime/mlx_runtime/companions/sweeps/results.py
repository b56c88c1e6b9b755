"""The results of a sweep, read from the records and metrics of its runs, during or after the sweep."""

import contextlib
import copy
import dataclasses
import functools
import html
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.sweeps.scores import Trial, TrialRun, metrics_at, ranked, read_trials
from mlx_runtime.companions.sweeps.space import parts_of
from mlx_runtime.errors import UsageError, printable, suggest
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import list_checkpoints
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import Row
from mlx_runtime.runs.queries.ranking import MORE
from mlx_runtime.runs.tables import aligned, format_number, plural
from mlx_runtime.storage.files import join_path

if TYPE_CHECKING:
    import pandas

    from mlx_runtime.runs.queries.reader import Run


FUNCTIONS = "mlx_runtime.companions.notebook.functions.FunctionExperiment"
"""Path of the experiment that calls training functions."""


def open_sweep(sweep: str | Path) -> "SweepResult":
    """Open a sweep for reading, even while it runs.

    Args:
        sweep: `name/sweep_001`, or the path or URI of its folder. A name is looked up in the storage of the experiment
            in the working directory, or in `MLX_STORAGE`.

    Raises:
        UsageError: There is no such sweep.
    """
    return SweepResult(lookup.resolve_run(str(sweep)))


class SweepResult:
    """The trials of a sweep, in their state at the creation of this object.

    Args:
        folder: Folder of the sweep.

    Attributes:
        definition: Definition of the sweep: `overrides`, `search`, `scheduler`, `metric`, `mode`, `folds`, `seeds`, …
        trials: All trials, by number.

    Raises:
        StorageError: The record of the sweep cannot be read.
        UsageError: The folder belongs to a run.
    """

    def __init__(self, folder: RunFolder) -> None:
        record = records.load_record(folder)
        if "definition" not in record:
            raise UsageError(f"{folder.title} is a run, not a sweep")
        self.folder = folder
        self.definition: dict[str, Any] = record["definition"]
        self.metric: str = self.definition["metric"]
        self.mode: str = self.definition["mode"]
        self.folds: int | None = self.definition["folds"]
        self.parts = parts_of(self.definition["seed"], self.definition.get("seeds"), self.folds)
        self.trials = read_trials(folder, record["trials"], self.metric, self.mode)

    @property
    def best(self) -> Trial:
        """The trial with the best value of the metric, except failed ones.

        Raises:
            UsageError: No trial has recorded the metric.
        """
        if ranked := [trial for trial in self.ranked() if trial.score is not None and trial.status != "FAILED"]:
            return ranked[0]
        problem = f"no trial of {self.folder.title} has recorded {printable(self.metric, one_line=True)}"
        if errors := [f"trial {trial.number}: {trial.error}" for trial in self.trials if trial.error]:
            raise UsageError(f"{problem}; {errors[0].partition(chr(10))[0]}")
        if any(trial.curve for trial in self.trials):
            raise UsageError(f"no trial of {self.folder.title} has a finite value of {self.metric}")
        recorded = {name for trial in self.trials for run in trial.runs for name in metrics_at(run.epochs, None)}
        raise UsageError(f"{problem}.{suggest(self.metric, recorded)}")

    @property
    def command(self) -> str:
        """Command that trains the best configuration in a new run, or Python code if there is no command for it."""
        chosen = {override.partition("=")[0]: override for override in self.best.overrides}
        given = self.definition["overrides"]
        if self.folds:  # the run trains on all rows
            given = [text for text in given if not re.match(r"[+~]*cfg\.cross_validation\b", text)]
        overrides = [chosen.pop(text.partition("=")[0], text) for text in given]
        overrides += chosen.values()
        path = self.definition.get("experiment")
        if path == FUNCTIONS:
            function = self.best_config()["cfg"]["function"].rpartition(".")[2]
            return f"trainer.run({function}, {self.get_best_config()})"
        if path:
            return f"run({path.rpartition('.')[2]}, {overrides})"
        return shlex.join(["mlx", "train", "run", *overrides])

    @property
    def runs(self) -> "list[Run]":
        """All runs, in order of trials and folds."""
        from mlx_runtime.runs.queries.reader import Run

        return [Run(row.folder) for trial in self.trials for row, _ in trial.started]

    def best_config(self) -> dict[str, Any]:
        """Return the conf.yaml of the best trial as plain dicts, without folds and their splitter, to train on all
        rows.

        Raises:
            UsageError: No trial has recorded the metric.
            StorageError: The file cannot be read.
        """
        config = self.best_run.config
        if self.folds:
            config["cfg"]["cross_validation"] |= {"folds": None, "fold": None, "splitter": None}
        return config

    def get_best_config(self, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
        """Return the `config` of a training function in the best trial.

        Args:
            metric: Metric by which trials are compared; the default is the metric of the sweep.
            mode: `max` or `min`; the default is the mode of the sweep.

        Raises:
            UsageError: No trial has recorded the metric, or the sweep trained an experiment.
        """
        if self.definition.get("experiment") != FUNCTIONS:
            raise UsageError(f"{self.folder.title} trained an experiment, whose conf.yaml is best_config()")
        config: dict[str, Any] = self.ranked_by(metric, mode).best_config()["cfg"]["config"]
        return config

    @property
    def best_run(self) -> "Run":
        """The run of the best trial, as `open_run` returns it; of several, that of the first seed and fold.

        Raises:
            UsageError: No trial has recorded the metric.
        """
        from mlx_runtime.runs.queries.reader import Run

        return Run(self.best.started[0][0].folder)

    def ranked_by(self, metric: str | None = None, mode: str | None = None) -> "SweepResult":
        """Return these results with the trials compared by another metric or mode.

        Raises:
            UsageError: The mode is neither `max` nor `min`, or missing for another metric.
        """
        if metric in (None, self.metric) and mode in (None, self.mode):
            return self
        if mode not in ("max", "min"):
            raise UsageError(f"mode is {mode!r}; is the best {metric or self.metric} the 'max' or the 'min'?")
        result = copy.copy(self)
        result.__dict__.pop("metric_names", None)
        result.metric, result.mode = metric or self.metric, mode
        result.trials = [dataclasses.replace(trial, metric=result.metric, mode=mode) for trial in self.trials]
        return result

    def table(self) -> "pandas.DataFrame":
        """Return one row per trial: its values, status, best epoch, metrics, and its duration in seconds.

        Metrics are those of the best epoch, and those that a run has recorded only once, such as the values of a final
        test. With seeds or folds, they are means over the runs, and columns like `val/loss_std` contain standard
        deviations.
        """
        import pandas

        rows = [self._row(trial) for trial in self.trials]
        return pandas.DataFrame(rows, columns=None if rows else ["trial"]).set_index("trial")

    def ranked(self) -> list[Trial]:
        """Return the trials, best first; failed ones and those without a finite value come last."""
        return ranked(self.trials, self.mode)

    @functools.cached_property
    def metric_names(self) -> list[str]:
        """Names of all metrics, beginning with the one by which trials are ranked."""
        names = {name: None for trial in self.trials for name in trial.metrics}
        return sorted(names, key=lambda name: name != self.metric)

    def summary(self) -> dict[str, Any]:
        """Return the best trial as plain values."""
        best = self.best
        kept = [self._find_checkpoint(*started, best) for started in best.started]
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": best.score,
            "std": best.spread.get(self.metric),
            "epoch": best.epoch,
            "experiment": self.folder.experiment,
            "sweep": self.folder.name,
            "trial": best.number,
            "values": best.values,
            "runs": [row.folder.name for row, _ in best.started],
            **({"checkpoints": kept} if len(self.parts) > 1 else {"checkpoint": kept[0]}),
            "command": self.command,
        }

    def lines(self) -> list[str]:
        """Format the summary for the terminal."""
        found, epoch = self.summary(), self.best.epoch
        spread = f" ± {format_number(found['std'])}" if found["std"] is not None else ""
        at = f", epoch {epoch}" if len(self.parts) > 1 else ""
        rows = {self.metric: f"{format_number(found['value'])}{spread} ({self.mode}{at})"}
        rows["trial"] = f"{found['trial']} of {self.folder.title}"
        if found["values"]:
            rows["values"] = " ".join(f"{key}={value}" for key, value in found["values"].items())
        rows["run"] = f"{self.folder.experiment}/{', '.join(found['runs'])}"
        lost = f"none of epoch {epoch} is kept; {MORE}"
        if len(self.parts) > 1:
            titled = zip(self.parts, found["checkpoints"], strict=False)  # there is a result before the last run
            rows |= {part.title: path or lost for part, path in titled}
        else:
            rows["checkpoint"] = f"{found['checkpoint']} (epoch {epoch})" if found["checkpoint"] else lost
        return aligned(rows | {"full run": found["command"]})

    def _find_checkpoint(self, row: Row, run: TrialRun, trial: Trial) -> str | None:
        """Return the path of the checkpoint of a run at the best epoch of its trial; None if it was removed."""
        value = run.curve(self.metric).get(trial.epoch or 0) if len(self.parts) > 1 else trial.score
        saved = [item for item in list_checkpoints(row.folder.checkpoints) if item.epoch + 1 == trial.epoch]
        kept = [item for item in saved if item.metrics.get(self.metric) == value]
        kept = kept or [item for item in saved if item.finished]
        return join_path(row.folder.checkpoints, kept[-1].name) if kept else None

    def _row(self, trial: Trial) -> dict[str, Any]:
        known, spread = trial.metrics, trial.spread
        metrics: dict[str, float] = {}
        for name in self.metric_names:
            metrics[name] = known.get(name, math.nan)
            if len(self.parts) > 1:
                metrics[f"{name}_std"] = spread.get(name, math.nan)
        facts = {"status": trial.status, "epoch": trial.epoch}
        return {"trial": trial.number, **trial.values, **facts, **metrics, "duration_s": trial.duration_s}

    def __repr__(self) -> str:
        text = f"<SweepResult {self.folder.title}, {plural(len(self.trials), 'trial')}"
        with contextlib.suppress(UsageError):
            given = " ".join(text.lstrip("+") for text in self.best.overrides)
            values = f" with {given}" if given else ""
            text += f", best {self.metric} {format_number(self.best.score)}{values}"
        return f"{text}>"

    def _repr_html_(self) -> str:
        ranked = self.table().loc[[trial.number for trial in self.ranked()]]
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{ranked.to_html(max_rows=30, na_rep='')}"
