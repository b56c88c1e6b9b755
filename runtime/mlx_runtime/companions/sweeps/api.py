"""Sweeps and cross-validation from Python: in a notebook, or in a script below `if __name__ == "__main__"`."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Literal

from mlx_runtime.companions.notebook import importable, require_list
from mlx_runtime.companions.sweeps.controller import Listener
from mlx_runtime.companions.sweeps.definition import Definition, plan
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.sweeps.starting import claim
from mlx_runtime.companions.sweeps.terminal import engine_for
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.training.engines import JOB_FLAG, warm_up
from mlx_runtime.training.loop import BaseModule


def sweep(
    experiment: type[BaseModule],
    overrides: Sequence[str] = (),
    *,
    trials: int | None = None,
    search: Literal["grid", "random", "optuna"] | None = None,
    scheduler: Literal["none", "asha"] = "none",
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    folds: int | None = None,
    parallel: int | None = None,
    gpus_per_trial: float | None = None,
    name: str = "",
    listeners: Sequence[Listener] = (),
) -> SweepResult:
    """Train an experiment with many configurations, like `mlx train sweep`, and return their results.

    Call this in the folder of the experiment. Nothing is printed; the output of each run is in its log. An interrupted
    sweep can be resumed with `mlx train sweep --resume`.

    Args:
        experiment: Class to train. The one in `src/experiment.py` is trained with conf.yaml; classes of other modules,
            such as `%%mlx` cells of a notebook, are trained with the defaults in their code.
        overrides: Overrides in Hydra's sweep grammar, like `optimizers.adam.lr=tag(log, interval(1e-4, 1e-2))`.
        trials: Number of configurations; the default is the whole grid.
        search: `grid`, `random` or `optuna`; the default is `optuna` if there are intervals, otherwise `grid`.
        scheduler: `asha` ends unpromising trials early.
        metric: Metric by which trials are compared; the default is `cfg.monitor`.
        mode: `max` or `min`, whether larger or smaller values are better; the default is `cfg.mode`.
        folds: Cross-validate each trial with this many folds.
        parallel: Number of runs at the same time; the default is as many as fit.
        gpus_per_trial: GPUs of each run; below 1, runs share one.
        name: Name of the sweep; the default is the next number.
        listeners: Called with each event of the sweep (`mlx_runtime.companions.sweeps.events`).

    Raises:
        UsageError, ConfigError: The sweep cannot start; nothing was written.
        MlxError: All trials failed, or none records the metric.
    """
    words = require_list(overrides)
    if trials is not None and trials < 1:
        raise UsageError(f"trials is {trials}; the minimum is 1")
    asked: dict[str, Any] = {"search": search, "scheduler": scheduler, "metric": metric, "mode": mode, "trials": trials}
    asked |= {"folds": folds, "parallel": parallel, "gpus_per_trial": gpus_per_trial}
    given = {key: value for key, value in asked.items() if value is not None}
    module, qualname = importable(experiment)
    if module != AN_EXPERIMENT.module:
        given["experiment"] = f"{module}.{qualname}"
    checked = plan(experiment, Definition(words, **given), large=True)
    if JOB_FLAG not in os.environ:
        warm_up(experiment.__module__)  # a notebook has threads, and so may a script after its first sweep
    with contextlib.closing(engine_for(checked)) as engine:
        claimed = claim(checked, name, listeners=listeners)
        with claimed.supervise():
            engine.run(claimed)
    result = SweepResult(claimed.record.folder)
    if all(trial.status == "FAILED" for trial in result.trials):
        first = (result.trials[0].error or "").partition("\n")[0]
        raise MlxError(f"all trials of {result.folder.title} failed, the first with: {first}")
    return result


def kfold(
    experiment: type[BaseModule], overrides: Sequence[str] = (), *, folds: int = 5, **options: Any
) -> SweepResult:
    """Cross-validate an experiment, and return means and standard deviations over the folds.

    Args:
        experiment: Class to train.
        overrides: Overrides. With several values, the result is a sweep whose trials are all cross-validated.
        folds: Number of folds.
        options: Further arguments of `sweep`.
    """
    return sweep(experiment, overrides, folds=folds, **options)
