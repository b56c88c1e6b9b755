"""The job that trains a run launched from Python: its log has frames for the machines that follow it.

`out` frames are the events of the run, one JSON object per line; the last one, of the kind `END`, is the outcome.
`file` frames are the values that a training function has returned, by rank; nothing in them can run code.

With `LAUNCH`, it submits that job from the cluster, for a machine that lacks the storage, and prints an answer.
"""

import base64
import io
import json
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mlx_runtime.companions import part
from mlx_runtime.companions.notebook import inputs
from mlx_runtime.companions.notebook.background import load_bound_config
from mlx_runtime.companions.notebook.calls import kept_settings, override
from mlx_runtime.companions.notebook.cluster_runs import ASKED, END, KEY, LAUNCH, SENT, submit
from mlx_runtime.companions.notebook.functions import FunctionConfig
from mlx_runtime.config.projects import project_module
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import MlxError, full_message, short_message
from mlx_runtime.events import Event, FunctionReturned, RunEnded, StepProgress, WorkerEvent, encode
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs.checkpoints.groups import copy_to_cpu, plain_entries
from mlx_runtime.runs.queries.lookup import storage_root
from mlx_runtime.storage.files import storage_root as root_of
from mlx_runtime.storage.redaction import redact

KINDS = "numbers, text, tensors, or lists and dicts of these; of a model, model.state_dict()"
"""What a function can return to another machine."""


def send_event(event: Event) -> None:
    """Send an event of the run, in the thread of the driver."""
    match event:
        case RunEnded(status=status, error=error, metrics=metrics, best=best):
            failed = error if status == "FAILED" else None
            text = redact(full_message(failed)) if failed is not None else None
            facts = {"kind": END, "status": status, "metrics": dict(metrics), "best": best, "error": text}
            _send_line(json.dumps(facts).encode())
        case FunctionReturned():
            _send_line(encode(_send_value(event)))
        case WorkerEvent() if not isinstance(event, StepProgress):
            _send_line(encode(event))


def _send_line(line: bytes) -> None:
    part("ray.frames").Stream("out").write(line + b"\n")


def _send_value(event: FunctionReturned) -> FunctionReturned:
    """Send a value as a file. Return the event without the value."""
    problem = ""
    try:
        content = write_value(pickle.loads(base64.b64decode(event.pickled)))
        part("ray.frames").send_file(str(event.rank), content)
    except MlxError as error:
        problem = f"what rank {event.rank} returned was not sent back: {error}"
    return FunctionReturned(event.rank, event.world_size, "", problem)


def write_value(value: Any) -> bytes:
    """Return a value as bytes that another machine reads with `weights_only=True`, on its CPU.

    Raises:
        MlxError: it would not.
    """
    kept, refused = plain_entries({"value": value})
    try:
        torch.save(value if refused else copy_to_cpu(kept["value"]), file := io.BytesIO())
        content = file.getvalue()
        if not (classes := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))):
            torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch and the user's classes raise many types
        raise MlxError(f"{short_message(error)}; return {KINDS}") from error
    if classes:
        raise MlxError(f"it contains {', '.join(sorted(classes))}; return {KINDS}")
    return content


def main(key: str, module: str, name: str, function: str, *words: str) -> None:
    """Train a run in this job.

    Args:
        key: key of the frames.
        module: module of the experiment's class.
        name: name of that class.
        function: path of the training function, or an empty string.
        words: the request, as arguments of main.py.
    """
    os.environ[KEY] = key
    experiment = getattr(project_module(module, Path.cwd()), name)
    config = load_bound_config(experiment, Request.parse(words), function or f"{module}.{name}")
    if isinstance(config.cfg, FunctionConfig):  # report its errors before the run begins; values name its classes
        inputs.load_function(root_of(config.cfg.storage_path), function, config.cfg.function_file)
    with connect(config.cfg) as cluster:
        fit(experiment, config, cluster, listeners=[send_event])


def _copy(file: Path, target: BinaryIO) -> None:
    target.write(file.read_bytes())


def launch() -> dict[str, Any]:
    """Store the inputs of a run, and submit its job. Return the facts about it, or an error."""
    asked = json.loads((SENT / ASKED).read_text())
    root, request = storage_root(), Request.parse(asked["words"])
    try:
        for file in (SENT / inputs.INPUTS).glob("*"):
            inputs.store(root, partial(_copy, file))
        if asked["function"]:
            kept = kept_settings(asked["resume"], asked["values"], root)
            given = [override(f"cfg.{name}", value) for name, value in kept.items()]
            request = Request((*request.overrides, *given), resume=request.resume)
        run = submit(asked["module"], asked["name"], asked["function"], request, asked["url"])
    except MlxError as error:
        return {"error": full_message(error), "hint": error.hint}
    return {"job": run.job, "key": run.key, "folder": run.folder}


if __name__ == "__main__":
    with clean_exit():
        if sys.argv[1:] == [LAUNCH]:
            print(f"{os.environ[KEY]} {json.dumps(launch())}", flush=True)
        else:
            main(*sys.argv[1:])
