"""The predictor of a stored run: its experiment, with the weights of a checkpoint, and the columns that it reads."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mlx_runtime.companions.serving.predictor import (
    Outputs,
    PredictError,
    Predictor,
    checked_outputs,
    rows_in,
    user_line,
)
from mlx_runtime.companions.serving.schema import Schema
from mlx_runtime.config.building import build, build_cfg, build_group, built_to_be_restored
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.data.batches import Batch, move_tensors
from mlx_runtime.data.definitions import construction, stream_names
from mlx_runtime.data.loaders import DatasetShard, LoaderOptions, trains
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.errors import USER_ERRORS, StorageError, UsageError, short_message
from mlx_runtime.loop.examples import EXAMPLES
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.optimization import prepare_models
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.checkpoints.groups import lacks_weights, load_into, members
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.folder import RunFolder, read_errors
from mlx_runtime.runs.queries.lookup import find_checkpoint, resolve_checkpoint
from mlx_runtime.runs.queries.reader import Run, matching_code
from mlx_runtime.storage.files import join_path

PREDICT_HINT = (
    'write it in src/experiment.py, like: def predict(self, batch): return {"logits": self.models.net(batch["image"])}'
)

Examples = dict[str, tuple[Batch, Mapping[str, Any]]]
"""Example rows by stage, and the shapes of further rows by column."""

SEED = 0
"""Seed of the calls that determine which columns `predict` reads."""


def load_predictor(
    run: Run, folder: RunFolder, checkpoint: str | int | None = None, *, device: str | None = None, trust: bool = False
) -> Predictor:
    """Return the predictor of a run; see `Run.predictor`."""
    return load_parts(run, folder, choose_checkpoint(folder, checkpoint), device=device, trust=trust)[2]


def load_parts(
    run: Run, folder: RunFolder, chosen: CheckpointInfo, *, device: str | None = None, trust: bool = False
) -> tuple[BaseModule, Mapping[str, Any], Predictor]:
    """Return the experiment of a run, its config, and its predictor; see `load_experiment`."""
    experiment, nodes = load_experiment(run, folder, chosen.name, trust=trust)
    target = device_of(device, experiment.cfg.use_gpu)
    title = f"{folder.title} {chosen.name}"
    prepare(experiment, target)
    examples = stored_examples(folder)
    own = [name for name in nodes.get("datasets", {}) if name.startswith("predict") and name not in examples]
    if own or not examples:
        examples = read_examples(experiment, nodes) | examples
    schema = known_columns(experiment._answer, examples, title, target)
    return experiment, nodes, Predictor(experiment._answer, schema, title, target)


def choose_checkpoint(folder: RunFolder, which: str | int | None) -> CheckpointInfo:
    """Return a checkpoint of a run, also by its path: by default the best, or the latest if there is no best one."""
    if isinstance(which, str) and "/" in which:
        owner, path = resolve_checkpoint(which)
        if owner.path.resolve() != folder.path.resolve():
            raise UsageError(f"{which} is a checkpoint of {owner.title}, not of {folder.title}")
        which = path.partition("?")[0].rpartition("/")[2]
    if which is not None:
        return find_checkpoint(folder, which)
    try:
        return find_checkpoint(folder, "best")
    except UsageError:
        return find_checkpoint(folder, "latest")


def load_experiment(
    run: Run, folder: RunFolder, checkpoint: str, *, trust: bool = False
) -> tuple[BaseModule, Mapping[str, Any]]:
    """Build the experiment of a run outside of a run, with the models and tools of a checkpoint, on the CPU.

    Return it and its config, whose `_target_`s can be imported here. Losses and metrics are new, a dataset is
    constructed when it is first read, and `optimizers` is None.

    Raises:
        UsageError: the run has no models, like those of functions, or its experiment has no `predict`.
        ConfigError: the code does not match the run.
    """
    config = run.config
    refuse_function(folder, config)
    tree = {name: node for name, node in config.items() if not name.startswith("_")}
    tree["class"] = {"_target_": f"{AN_EXPERIMENT.module}.{AN_EXPERIMENT.main}"}
    with matching_code(folder, "predictor", "the experiment", tree, trust=trust) as nodes:
        cls = object_at(nodes.pop("class")["_target_"])
        if getattr(cls, "predict", BaseModule.predict) is BaseModule.predict:
            raise UsageError(f"{cls.__name__} of {folder.title} has no predict; {PREDICT_HINT}")
        state = run.state(checkpoint)
        groups: dict[str, Any] = {"cfg": build_cfg(nodes["cfg"], TrainConfig)}
        with temporary_seed(groups["cfg"].seed):  # as in the run, for buffers that checkpoints do not contain
            for name, node in nodes.items():
                if name != "cfg":
                    groups[name] = _group(name, node, groups["cfg"], whole=not lacks_weights(state["models"]))
        load_into(groups["models"], state["models"], "models")
        if "tools" in groups:
            load_into(groups["tools"], state.get("tools", {}), "tools")
        return cls(**groups), nodes


def refuse_function(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Raise UsageError if a run has no models, like those of functions."""
    if "models" not in config:
        raise UsageError(f"{folder.title} is the run of a function, which has no predict; write an experiment")


def _group(name: str, node: Any, cfg: Any, *, whole: bool) -> Any:
    if name == "datasets":
        return build_group(node, name, lambda item: construction(node[item], cfg.seed))
    if name == "models" and whole:
        return built_to_be_restored(partial(build, node, name))
    return None if name == "optimizers" else build(node, name)


def device_of(name: str | None, use_gpu: bool | None = None) -> torch.device:
    """Return a device by name, by default the GPU that torch uses unless `use_gpu` is False.

    Raises:
        UsageError: there is no such device.
    """
    if name is None:
        return torch.device("cpu") if use_gpu is False else device_here()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"there is no device {name!r}: {short_message(error)}") from error
    return device


def prepare(experiment: BaseModule, device: torch.device) -> None:
    """Move the models to a device, in eval mode and the precision of the run, and the tensors of tools with them."""
    models = members(experiment.models, nn.Module).values()
    for module in (*models, *members(experiment.tools, nn.Module).values()):
        module.to(device).eval().requires_grad_(False)
    prepare_models(models, replace(experiment.cfg, compile=False), device)


def stored_examples(folder: RunFolder) -> Examples:
    """Return the example rows that a run has recorded.

    Raises:
        StorageError: they cannot be read.
    """
    with read_errors(folder, EXAMPLES):
        try:
            content = folder.read(EXAMPLES)
        except FileNotFoundError:
            return {}
        try:
            return examples_of(torch.load(io.BytesIO(content), weights_only=True))
        except Exception as error:  # a damaged file raises many types
            raise StorageError(f"{join_path(folder.location, EXAMPLES)} is damaged: {short_message(error)}") from error


def examples_of(stages: Mapping[str, Any]) -> Examples:
    """Return the example rows in the content of `examples.pt`."""
    return {str(name): (dict(item["rows"]), dict(item["shapes"])) for name, item in stages.items()}


def read_examples(experiment: BaseModule, nodes: Mapping[str, Any]) -> Examples:
    """Return example rows of a dataset, for a run that has not recorded any."""
    names = by_preference(name for name in nodes.get("datasets", {}) if not name.startswith("_"))
    for name in names:
        if name not in stream_names(nodes):
            shard = shard_of(experiment, nodes, name)
            return {name: (next(iter(shard.iter_torch_batches(batch_size=3))), {})}
    return {}


def by_preference(names: Any) -> list[str]:
    """Return names of datasets: first those of predictions, then of other evaluations."""
    return sorted(names, key=lambda name: (not name.startswith("predict"), not name.startswith("test"), trains(name)))


def shard_of(experiment: BaseModule, nodes: Mapping[str, Any], name: str) -> DatasetShard:
    """Return the shard of a dataset that has all its rows, in order."""
    topology = Topology(0, 1, torch.device("cpu"))
    options = LoaderOptions(experiment.cfg.seed, repeats=True)
    return DatasetShard(name, experiment.datasets, topology, options, node=nodes["datasets"][name])


def known_columns(
    predict: Callable[[Batch], Any],
    examples: Examples,
    title: str,
    device: torch.device,
) -> Schema:
    """Return the schema of the columns that `predict` reads, found by calling it without each of them.

    Raises:
        UsageError: there are no examples.
        PredictError: it fails on the examples of all datasets.
    """
    problem = None
    shapes_of_all = [shapes for _, shapes in examples.values()]
    for name in by_preference(examples):
        rows, _ = examples[name]
        seen = {column: [shape for shapes in shapes_of_all for shape in shapes.get(column, ())] for column in rows}
        schema = Schema.of_batch(rows, seen)
        call = partial(_call, predict, device)
        try:
            expected, kept = call(rows), dict(rows)
        except PredictError as error:
            known = ", ".join(rows)
            problem = problem or f"predict fails on rows of {name} in {title}, whose columns are {known}: {error}"
            continue
        for column in rows:
            fewer = {item: value for item, value in kept.items() if item != column}
            if fewer and _answers_equally(call, fewer, expected):
                kept = fewer
        return schema.narrowed(tuple(kept))
    if problem is None:
        raise UsageError(f"{title} has recorded no example rows, and has no dataset to read some from")
    raise PredictError(problem)


def problem_of_predict(experiment: BaseModule, stages: Mapping[str, Any], device: torch.device) -> str:
    """Return a line if `predict` fails on the example rows of all stages; empty if not, or if its rows are others."""
    if any(name.startswith("predict") for name in members(experiment.datasets)):
        return ""
    for module in members(experiment.tools, nn.Module).values():
        module.to(device).eval()
    try:
        known_columns(experiment._answer, examples_of(stages), "this run", device)
    except PredictError as error:
        return f"{error}; until it is fixed, this run cannot predict, be exported or served"
    return ""


def _call(predict: Callable[[Batch], Any], device: torch.device, batch: Batch) -> Outputs:
    with temporary_seed(SEED), torch.no_grad():
        try:
            return checked_outputs(predict(move_tensors(batch, lambda item: item.to(device))), rows_in(batch))
        except PredictError:
            raise
        except USER_ERRORS as error:
            raise PredictError(user_line(error)) from error


def _answers_equally(call: Callable[[Batch], Outputs], batch: Batch, expected: Outputs) -> bool:
    try:
        found = call(batch)
    except PredictError:
        return False
    return found.keys() == expected.keys() and all(
        found[name].shape == value.shape and torch.allclose(found[name], value, equal_nan=True)
        for name, value in expected.items()
    )
