"""Sweeps and cross-validation from Python, in a notebook or a script, of experiments and of training functions."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.companions.notebook.calls import changed_definitions, override, run_settings
from mlx_runtime.companions.notebook.function_runs import Trainer
from mlx_runtime.companions.notebook.functions import FunctionExperiment
from mlx_runtime.companions.notebook.runs import importable, require_list
from mlx_runtime.companions.sweeps.controller import Listener
from mlx_runtime.companions.sweeps.definition import Definition, plan
from mlx_runtime.companions.sweeps.results import FUNCTIONS, SweepResult
from mlx_runtime.companions.sweeps.starting import checked_plan, drive, find_sweep
from mlx_runtime.config.composition import parse_overrides
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.importing import add_to_path
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs import records
from mlx_runtime.storage.files import storage_root
from mlx_runtime.workers.local import warm_up

VARIES = re.compile(r"(choice|range|interval|tag|int)\(.*\)", re.DOTALL)
"""Texts in a config that stand for several values, in Hydra's sweep grammar."""


def sweep(
    experiment: type[BaseModule] | Callable[..., Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    trials: int | None = None,
    search: Literal["grid", "random", "optuna"] | None = None,
    scheduler: Literal["none", "asha"] = "none",
    metric: str | None = None,
    mode: Literal["max", "min"] | None = None,
    folds: int | None = None,
    seeds: int | None = None,
    parallel: int | None = None,
    gpus_per_trial: float | None = None,
    name: str = "",
    resume: str | None = None,
    listeners: Sequence[Listener] = (),
    **settings: Any,
) -> SweepResult:
    """Train an experiment with many configurations, like `mlx train sweep`, and return their results.

        result = sweep(train_func, {"lr": "choice(0.1, 0.01)"}, num_workers=2, metric="loss", mode="min")
        print(result.get_best_config())

    Call this in the folder of the experiment. Nothing is printed; the output of each run is in its log. An interrupted
    sweep can be resumed with `resume`, or `mlx train sweep --resume`.

    Args:
        experiment: Class to train. The one in `src/experiment.py` is trained with conf.yaml; classes of other modules,
            such as `%%mlx` cells of a notebook, are trained with the defaults in their code. Or a training function, as
            for `Trainer.run`.
        overrides: Overrides in Hydra's sweep grammar, like `optimizers.adam.lr=tag(log, interval(1e-4, 1e-2))`. For a
            function, its config, with texts in this grammar in place of values that vary.
        trials: Number of configurations; the default is the whole grid.
        search: `grid`, `random` or `optuna`; the default is `optuna` if there are intervals, otherwise `grid`.
        scheduler: `asha` ends unpromising trials early.
        metric: Metric by which trials are compared; the default is `cfg.monitor`.
        mode: `max` or `min`, whether larger or smaller values are better; the default is `cfg.mode`.
        folds: Cross-validate each trial with this many folds.
        seeds: Train each trial with this many seeds: `cfg.seed`, and those after it.
        parallel: Number of runs at the same time; the default is as many as fit.
        gpus_per_trial: GPUs of each run; below 1, runs share one.
        name: Name of the sweep; the default is the next number.
        resume: Sweep to resume, like `sweep_001`, or `latest`. Its code and the other arguments must be the same.
            Failed trials are not repeated.
        listeners: Called with each event of the sweep (`mlx_runtime.companions.sweeps.events`).
        settings: For a function, arguments of `Trainer` like `num_workers=2` and `use_gpu=True`, and `dataset`, as for
            `Trainer.run`.

    Raises:
        UsageError, ConfigError: The sweep cannot start; nothing was written.
        MlxError: All trials failed, or none records the metric.
    """
    for argument, value in (("trials", trials), ("seeds", seeds)):
        if value is not None and value < 1:
            raise UsageError(f"{argument} is {value}; the minimum is 1")
    asked: dict[str, Any] = {"search": search, "scheduler": scheduler, "metric": metric, "mode": mode, "trials": trials}
    asked |= {"folds": folds, "seeds": seeds, "parallel": parallel, "gpus_per_trial": gpus_per_trial}
    given = {key: value for key, value in asked.items() if value is not None}
    cls: type[BaseModule]
    if inspect.isfunction(experiment):
        if folds or scheduler == "asha":
            cure = (
                "folds split the datasets of an experiment" if folds else "asha needs trials of cfg.num_epochs epochs"
            )
            raise UsageError(f"{experiment.__name__} is a function, but {cure}")
        compared = {"monitor": metric, "mode": mode} if metric and mode else {}  # also selects the checkpoints to keep
        words = function_overrides(experiment, overrides, {**compared, **settings})
        cls, given["experiment"] = FunctionExperiment, FUNCTIONS
        add_to_path(Path.cwd())  # trials import the function by its path from here
    else:
        module, qualname = importable(experiment)
        assert isinstance(experiment, type), "it is no function"
        if isinstance(overrides, Mapping):
            raise UsageError(f"overrides is a dict; {qualname} takes a list of overrides, like 'cfg.seed=1,2'")
        if settings:
            raise UsageError(f"sweep has no argument {next(iter(settings))!r}; settings of {qualname} are overrides")
        words, cls = require_list(overrides), experiment
        if module != AN_EXPERIMENT.module:
            given["experiment"] = f"{module}.{qualname}"
    definition, folder = Definition(words, **given), None
    if resume is not None:
        cfg = plan(cls, definition, large=True).config.cfg
        folder = find_sweep(resume, storage_root(cfg.storage_path), cfg.name)
        if cls is FunctionExperiment:
            stored = records.load_record(folder)["definition"]["overrides"]
            definition = replace(definition, overrides=keep_function(words, stored, folder.title))
    checked = checked_plan(cls, definition, folder, large=True)
    warm_up(cls.__module__)  # a notebook has threads, and so may a script after its first sweep
    result = SweepResult(drive(checked, name, listeners=listeners))
    if all(trial.status == "FAILED" for trial in result.trials):
        raise MlxError(f"all trials of {result.folder.title} failed, the first with: {result.trials[0].error}")
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


def function_overrides(function: Callable[..., Any], config: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides of a sweep that calls a function.

    Args:
        function: training function.
        config: its config, with texts like `choice(0.1, 0.01)` in place of the values that vary.
        settings: arguments of `Trainer`, and `dataset`.

    Raises:
        UsageError, ConfigError: there is no such setting, the function cannot be called with the config, or nothing in
            it varies.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"a function is tuned over a config, like {{'lr': 'choice(0.1, 0.01)'}}, not {config!r:.60}")
    varying = dict(_varying("cfg.config", config))
    if not varying:
        raise UsageError(
            f"no value in the config of {function.__name__} varies; write some as text, like 'choice(0.1, 0.01)' or "
            "'interval(0.01, 0.1)'. A list is one value"
        )
    trainer = Trainer(**{name: value for name, value in settings.items() if name != "dataset"})
    _, values = run_settings(trainer.settings, function, dict(config), dataset=settings.get("dataset"))
    fixed = [override(f"cfg.{name}", value) for name, value in values.items()]
    return (*fixed, *(f"{key}={text}" for key, text in varying.items()))


def keep_function(words: Sequence[str], stored: Sequence[str], title: str) -> tuple[str, ...]:
    """Return the overrides of a sweep to resume, with its stored function: the same pickled again has other bytes.

    Raises:
        UsageError: a definition that the function uses was edited.
    """
    before, now = ({item.partition("=")[0]: item for item in found} for found in (stored, words))
    lists: list[Any] = [parse_overrides([found["++cfg.definitions"]])[0].value() for found in (before, now)]
    if changed := changed_definitions(*lists):
        names = ", ".join(changed)
        raise UsageError(f"{title} was started with another definition of {names}; undo the edits, or start a new one")
    return tuple((now | {key: before[key] for key in now if key == "++cfg.function_file"}).values())


def _varying(key: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys and texts of the values that vary."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _varying(f"{key}.{name}", value)
        elif isinstance(value, str) and VARIES.fullmatch(value) is not None:
            if not re.fullmatch(r"\w+", str(name)):
                raise UsageError(f"{name!r} varies, so its name must be one of letters, digits and underscores")
            if parse_overrides([f"++{key}.{name}={value}"])[0].is_sweep_override():
                yield f"++{key}.{name}", value
