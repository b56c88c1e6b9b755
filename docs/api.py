"""Writes api.md, the reference of all public names, from their signatures and docstrings."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")

SECTIONS = {
    "Experiments": (
        *("mlx_runtime.BaseModule", "mlx_runtime.TrainConfig", "mlx_runtime.DUMMY_PARAMS"),
        *("mlx_runtime.defer_loading", "mlx_runtime.prepare_model", "mlx_runtime.unwrap", "mlx_runtime.get_device"),
        "mlx_runtime.set_seed",
    ),
    "Experiments in JAX": ("mlx_runtime.jax.JaxModule", "mlx_runtime.jax.TrainConfig", "mlx_runtime.jax.Batches"),
    "Sections of `cfg`": (
        *("mlx_runtime.sections.CrossValidation", "mlx_runtime.sections.Debug", "mlx_runtime.sections.Elastic"),
        *("mlx_runtime.sections.Hub", "mlx_runtime.sections.Preparation", "mlx_runtime.sections.Sharding"),
        "mlx_runtime.sections.Tuning",
    ),
    "Datasets and losses": (
        *("mlx_runtime.datasets.DatasetShards", "mlx_runtime.datasets.DatasetShard", "mlx_runtime.datasets.Loader"),
        *("mlx_runtime.datasets.Batched", "mlx_runtime.losses.Mean"),
    ),
    "Runs from Python": (
        *("mlx_runtime.run", "mlx_runtime.open_run", "mlx_runtime.runs.queries.reader.Run", "mlx_runtime.load_export"),
        *("mlx_runtime.runs_table", "mlx_runtime.metrics_table"),
        *(
            "mlx_runtime.sweep",
            "mlx_runtime.kfold",
            "mlx_runtime.open_sweep",
            "mlx_runtime.companions.sweeps.results.SweepResult",
        ),
        *("mlx_runtime.load_config", "mlx_runtime.connect", "mlx_runtime.fit", "mlx_runtime.clean_exit"),
        *("mlx_runtime.clusterize", "mlx_runtime.companions.fragments.planning.Plan"),
    ),
    "Training functions": (
        *(
            "mlx_runtime.Trainer",
            "mlx_runtime.reattach",
            "mlx_runtime.report",
            "mlx_runtime.save_checkpoint",
            "mlx_runtime.load_checkpoint",
        ),
        *("mlx_runtime.get_dataset_shard", "mlx_runtime.companions.notebook.shards.FunctionShard"),
        "mlx_runtime.accelerate",
        *("mlx_runtime.world_rank", "mlx_runtime.local_rank", "mlx_runtime.world_size"),
    ),
    "Trackers": (
        *("mlx_runtime.trackers.TensorBoard", "mlx_runtime.trackers.CSV", "mlx_runtime.trackers.JSONL"),
        *("mlx_runtime.trackers.WandB", "mlx_runtime.trackers.MLflow"),
    ),
    "Data jobs": ("mlx_runtime.DataJob", "mlx_runtime.DataConfig", "mlx_runtime.run_job"),
    "Extending": (
        *("mlx_runtime.engines.EngineClass", "mlx_runtime.engines.Engine", "mlx_runtime.engines.Group"),
        *("mlx_runtime.engines.Cluster", "mlx_runtime.engines.Job", "mlx_runtime.engines.Topology"),
        *("mlx_runtime.engines.WorkerJob", "mlx_runtime.engines.run_worker", "mlx_runtime.engines.load_results"),
        *("mlx_runtime.engines.Remote", "mlx_runtime.engines.train_to", "mlx_runtime.engines.this_machine"),
        *("mlx_runtime.engines.changing_size", "mlx_runtime.engines.lost", "mlx_runtime.data.readers.Reader"),
        *("mlx_runtime.storages.Storage", "mlx_runtime.storages.Stored", "mlx_runtime.storages.storage_at"),
        "mlx_runtime.strategies.DDP",
        *("mlx_runtime.strategies.data_parallel_group", "mlx_runtime.strategies.gather"),
        *("mlx_runtime.driver.planning.RunExtension", "mlx_runtime.driver.planning.AccompaniedRun"),
    ),
    "Events": tuple(
        f"mlx_runtime.events.{name}"
        for name in (
            *("RunStarted", "RunInfo", "WorkersStarted", "StepProgress", "EpochEnded", "Report", "CheckpointSaved"),
            *("Notice", "WarningNotice", "WorkersLost", "StopRequested", "LoopEnded", "RunEnded"),
        )
    ),
    "Errors": ("mlx_runtime.MlxError",),
}
"""The names of each section, by the path that user code imports them from, or else where they are defined."""


def page() -> str:
    """Return the whole page."""
    parts = [
        "# API reference\n",
        "Written by `make docs` from the docstrings. The guides show how the parts are used together.\n",
    ]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            module, _, last = name.rpartition(".")
            parts += _entry(name, getattr(importlib.import_module(module), last))
    return "\n".join(parts)


def _entry(name: str, item: Any) -> Iterator[str]:
    """Yield the blocks about one name: a heading, the signature, the docstring, and the methods of a class."""
    yield f"### {name.removeprefix('mlx_runtime.')}\n"
    if not callable(item):
        yield "The `params` of optimizers in default values: a run replaces them with those of the models.\n"
        return
    if shown := _signature(name.rpartition(".")[2], item):
        yield f"```python\n{shown}\n```\n"
    yield _text(item)
    if not inspect.isclass(item):
        return
    for method, value in vars(item).items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if method.startswith("_") or not inspect.getdoc(function):
            continue
        if inspect.isfunction(function):
            yield f"#### {_signature(method, function)}\n"
            yield _text(function)
        elif isinstance(value, property):
            yield f"#### {method}\n"
            yield _text(value)


def _signature(name: str, item: Any) -> str:
    """Return a call with parameters and their defaults; nothing for a class that is not constructed by hand."""
    fields = dataclasses.is_dataclass(item) and len(dataclasses.fields(item)) > 8
    if inspect.isclass(item) and (fields or getattr(item, "_is_protocol", False) or issubclass(item, Exception)):
        return ""
    shown = []
    for parameter in inspect.signature(item).parameters.values():
        plain = parameter.replace(annotation=inspect.Parameter.empty)
        if not parameter.name.startswith(("self", "_")):
            shown.append(re.sub(r"<factory>|<[^>]*>", "...", str(plain)))
    return f"{name}({', '.join(shown)})"


def _text(item: Any) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    lines, blocks = (inspect.getdoc(item) or "").splitlines(), list[str]()
    section = False
    for line in lines:
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            section = True
            blocks += ["", f"*{line[:-1]}*", ""]
        elif section and (entry := re.fullmatch(r" {4}([\w.*, ]+): (.*)", line)):
            blocks.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("    "):
            blocks.append(f"  {line.strip()}" if blocks and blocks[-1].startswith(("- ", "  ")) else line.strip())
        else:
            section = section and not line
            blocks.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(blocks)).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
