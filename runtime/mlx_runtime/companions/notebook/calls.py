"""Calls of training functions: their arguments, checked and written as the settings of a run."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook import inputs
from mlx_runtime.companions.notebook.functions import takes_config
from mlx_runtime.companions.notebook.pickles import Captured
from mlx_runtime.companions.notebook.runs import importable
from mlx_runtime.config.binding.nodes import RESERVED
from mlx_runtime.config.composition import parse_overrides, quote
from mlx_runtime.config.interpolation import escape
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.folder import list_runs, named_run
from mlx_runtime.runs.queries.lookup import conf_value
from mlx_runtime.runs.queries.reader import Run
from mlx_runtime.sections import Elastic, Section
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import storage_root

MOST_TEXT = 20_000
"""Maximum length of a config, because it is recorded and passed on as an override."""

FIXED = {"dataset_files": "dataset", "fold": "fold"}
"""Settings that must be those of a run to resume, and the arguments that set them."""

MOST_WORKERS = 1000
"""Maximum of `num_workers=(4, inf)` on a cluster, where a group grows as long as there is room."""


def sizes(num_workers: Any, elastic: Elastic, room: int) -> tuple[int, Elastic]:
    """Return the number of workers to start, and the section `elastic`, for `num_workers=4` or `(4, 8)`.

    An infinite maximum means `room`.

    Raises:
        UsageError: it is neither a number nor a range.
    """
    if type(num_workers) is int and num_workers > 0:
        return num_workers, elastic
    fewest, most = num_workers if isinstance(num_workers, tuple) and len(num_workers) == 2 else (0, 0)
    most = max(fewest, room) if most == math.inf and type(fewest) is int else most
    if type(fewest) is not int or type(most) is not int or not 0 < fewest <= most:
        cure = "a Trainer needs a number of workers, 1 or more, or a range like (4, 8) or (4, math.inf)"
        raise UsageError(f"num_workers is {num_workers!r}; {cure}")
    if (elastic.min_workers, elastic.max_workers) != (None, None):
        raise UsageError(f"num_workers is {num_workers!r}, so leave out min_workers and max_workers of elastic=")
    return fewest, replace(elastic, min_workers=fewest, max_workers=most)


def run_settings(
    settings: Mapping[str, Any],
    function: Callable[..., Any],
    config: Mapping[str, Any] | None,
    *,
    dataset: Any = None,
    fold: tuple[int, int] | None = None,
    checkpoint: Mapping[str, Any] | str | Path | None = None,
    resume: str | None = None,
    root: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the import path of a function, and the settings of its run: values by their key below `cfg`.

    Datasets and checkpoints are stored first.

    Args:
        settings: those of the Trainer, with `start_workers`.
        function, config, dataset, fold, checkpoint, resume: see `Trainer.run_iterator`.
        root: folder for datasets and the like; by default, the storage.

    Raises:
        UsageError: the function cannot be called with these arguments.
    """
    if not inspect.isfunction(function):
        raise UsageError(f"{function!r} is not a function; write one that takes config, or nothing")
    path = ".".join(importable(function))
    _check_config(path, function, config)
    override("cfg.config", config or {})  # refuses its values before anything is written
    name = function.__name__.strip("<>")  # of a lambda
    values = {"name": name, **settings, "function": path, "config": config or {}}
    captured = Captured(function)
    if Settings.read().storage is None and (storage := conf_value("cfg.storage_path")) is not None:
        values.setdefault("storage_path", storage)
    root = root or storage_root(values.get("storage_path") or Settings.read().storage or "runs")
    streams = fold is None and settings.get("engine", "auto") != "local"
    datasets = {} if dataset is None else inputs.named(dataset, settings["start_workers"], streams=streams)
    if fold is not None:
        values["fold"] = _checked_fold(fold, datasets)
    if isinstance(checkpoint, str | Path):
        values["restore_checkpoint_path"] = escape(str(checkpoint))
    elif isinstance(checkpoint, Mapping):
        values["checkpoint_file"] = inputs.store_state(root, checkpoint)
    elif checkpoint is not None:
        raise UsageError(f"checkpoint is {checkpoint!r:.60}; it takes a dict, or the path of a stored checkpoint")
    if any(map(inputs.is_stream, datasets.values())):
        values["engine"] = "ray"
    if datasets:
        values["dataset_files"] = inputs.store_datasets(root, datasets, captured)
    values["definitions"] = [f"{name} {digest}" for name, digest in captured.digests.items() if digest]
    values |= kept_settings(resume, values, root)
    if not values.get("function_file") or not inputs.is_stored(root, values["function_file"]):
        values["function_file"] = inputs.store_function(root, captured)
    for name in [name for name, value in values.items() if isinstance(value, Section)]:
        values |= {f"{name}.{item}": value for item, value in vars(values.pop(name)).items()}
    return path, values


def _check_config(path: str, function: Callable[..., Any], config: Any) -> None:
    try:
        takes = takes_config(function, config)
    except TypeError:
        text = f"{path}{inspect.signature(function)} takes other arguments than config; put values into config"
        raise UsageError(text) from None
    if config is not None and not isinstance(config, dict):
        raise UsageError(f"config is {config!r:.60}; it takes a dict, like {{'lr': 0.1}}")
    if len(repr(config)) > MOST_TEXT:
        raise UsageError(
            f"config is longer than {MOST_TEXT:,} characters: put data into a file, and its path into config"
        )
    if config and not takes:
        raise UsageError(f"{path} takes nothing, so it cannot be called with a config; write {path}(config)")


def _checked_fold(fold: Any, datasets: Mapping[str, Any]) -> tuple[int, int]:
    whole = isinstance(fold, tuple) and len(fold) == 2 and all(type(item) is int for item in fold)
    if not whole or not 0 <= fold[0] < fold[1] or fold[1] < 2:
        raise UsageError(f"fold is {fold!r}; it takes the number of a fold and of all folds, like (0, 5) to (4, 5)")
    if list(datasets) != ["train"]:
        cure = "they split one dataset into 'train' and 'val', so pass a single one: dataset=rows"
        raise UsageError(f"folds need a dataset; {cure}" if not datasets else f"dataset has several names; {cure}")
    if len(datasets["train"]) < fold[1]:
        raise UsageError(f"dataset has {len(datasets['train'])} rows, fewer than {fold[1]} folds")
    return fold[0], fold[1]


def kept_settings(resume: str | None, values: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the settings that a run to resume keeps, because its function pickled again has other bytes.

    Raises:
        UsageError: it has called a function with other definitions, or with another dataset or fold.
    """
    name = values["name"]
    if resume is None or (resume == "auto" and all(run.in_sweep() for run in list_runs(root, name))):
        return {}
    run = named_run("latest" if resume == "auto" else resume, root, name)
    found = Run(run)
    before: dict[str, Any] = found.config["cfg"]
    for key, title in FIXED.items():
        if key in values and _plain(before.get(key)) != _plain(values[key]):
            cure = f"leave out {title}= to resume it with its own, or resume= to start a new run"
            raise UsageError(f"{run.title} was started with another {title}; {cure}")
    if changed := changed_definitions(before.get("definitions") or [], values["definitions"]):
        latest = found.record.get("latest")
        start = f", from its checkpoint with checkpoint={latest['path']!r}" if latest else ""
        raise UsageError(
            f"{run.title} was started with another definition of {', '.join(changed)}; undo the edits, or leave out "
            f"resume= to start a new run{start}"
        )
    return {name: before[name] for name in ("definitions", "function_file") if before.get(name)}


def changed_definitions(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the names of `FunctionConfig.definitions` that are new or have another digest than before."""
    return sorted(item.rpartition(" ")[0] for item in now if item not in before)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def override(key: str, value: Any) -> str:
    """Return the override that sets a key, new or not, to a plain value; tuples become lists.

    Raises:
        ConfigError: the value is not plain, or cannot be expressed in Hydra's grammar.
    """
    plain = _plain_value(value, key)
    text = f"++{key}={_literal(plain)}"
    read = parse_overrides([text])[0].value()
    if repr(read) != repr(plain):  # 1 equals 1.0 and True
        raise ConfigError(f"{key}={plain!r} cannot be written as an override, which would set {read!r}")
    return text


def _plain_value(value: Any, key: str) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:  # a number of NumPy
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_plain_value(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if type(value) is dict and (reserved := value.keys() & RESERVED):
        raise UsageError(f"{key} has the key {min(reserved)!r}, which names an object in conf.yaml; rename it")
    if type(value) is dict:
        return {name: _plain_value(item, f"{key}.{name}") for name, item in value.items()}
    kind = type(value).__name__
    raise ConfigError(f"{key} is a {kind}; conf.yaml holds numbers, text, None, and lists and dicts of these")


def _literal(value: Any) -> str:
    """Write a plain value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return quote(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
