"""Training functions as trainables of Ray Tune: each trial is a run on the node of the trial."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from ray import tune

from mlx_runtime.companions.notebook.functions import FunctionConfig
from mlx_runtime.runs.queries.reader import open_run
from mlx_runtime.workers.placement import JOB_FLAG, uses_gpus

if TYPE_CHECKING:
    from mlx_runtime.companions.notebook.function_runs import FunctionRun

Start = Callable[[Mapping[str, Any]], "FunctionRun"]

POINTER = "run"
"""File of a Tune checkpoint with the path or URI of the run that has the checkpoint."""


def tune_trainable(
    path: str, settings: Mapping[str, Any], cfg: FunctionConfig, start: Start
) -> Callable[[dict[str, Any]], None]:
    """Return a function trainable for `tune.Tuner`, which needs the resources of all workers on one node.

    Args:
        path: import path of the training function.
        settings: settings of its runs, by key below `cfg`.
        cfg: the same for the workers, checked.
        start: starts a run with settings like these.
    """
    project = Path.cwd()

    def trainable(config: dict[str, Any]) -> None:
        os.chdir(project if project.is_dir() else os.environ["TUNE_ORIG_WORKING_DIR"])  # Tune has left it
        os.environ.pop(JOB_FLAG, None)  # of the job; this run belongs to a trial
        values = {**settings, "config": config}
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                latest = open_run(Path(folder, POINTER).read_text()).record["latest"]
            values["restore_checkpoint_path"] = latest["path"]
        _report(start(values))

    trainable.__name__ = path.rpartition(".")[2]
    workers = cfg.start_workers
    gpus = cfg.gpus_per_worker * uses_gpus(cfg, torch.cuda.device_count())
    resources = {"CPU": workers * cfg.cpus_per_worker, "GPU": workers * gpus}
    made: Callable[[dict[str, Any]], None] = tune.with_resources(trainable, resources)
    return made


def _report(run: "FunctionRun") -> None:
    """Report the metrics of rank 0 to Tune, with the checkpoint of the same epoch if the function saves one."""
    saved, waits = None, True
    with contextlib.closing(cast("Generator[Any]", iter(run))) as reports:  # Tune ends a trial by an exception
        for results in reports:
            if waits:
                waits = run.wait_for_checkpoint(saved)
            path = run.checkpoint_path
            reported = {
                name: value for name, value in results[0].items() if not name.startswith("_")
            }  # Tune has its own
            metrics = {**reported, "run": run.folder} | ({} if path is None else {"checkpoint_path": path})
            if path == saved:
                tune.report(metrics)
                continue
            saved = path
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, POINTER).write_text(run.folder)
                tune.report(metrics, checkpoint=tune.Checkpoint(folder))
