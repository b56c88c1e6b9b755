"""Save and restore everything that changes while an experiment trains.

A checkpoint is a folder that is published atomically:

checkpoints/epoch_0004/
    state.pt           everything, as plain values and tensors: reading it never runs code (`weights_only=True`)
    checkpoint.json    what it is, its numbers, and the SHA-256 of state.pt

`state.pt` is a dict; what belongs to one rank is in `ranks`, one entry per worker:

    {"epoch": 3, "finished": True, "global_step": 180, "seed": 0, "world_size": 2, "config": saved conf.yaml,
     "models": {name: state}, "optimizers": {name: state}, "tools": {name: state}, "own": {name: state},
     "loaders": {name: position in its pass}, "numbers": {"latest": ..., "unreported": ...},
     "tracking": {"sizes": {file: length in bytes}, "reports": count, "seconds": trained}, "scaler": state,
     "on_device": [attribute of a tool that was on a GPU, ...],
     "ranks": [{"random": ..., "metrics": {name: state}, "losses": {name: state}}, ...]}
"""

from mlx_runtime.runs.checkpoints.groups import (
    State,
    copied,
    load_into,
    load_what_fits,
    members,
    merged,
    on_device,
    state_of,
)
from mlx_runtime.runs.checkpoints.store import PARTS, AsyncCheckpointer, Checkpoints, read, score

__all__ = [
    "PARTS",
    "AsyncCheckpointer",
    "Checkpoints",
    "State",
    "copied",
    "load_into",
    "load_what_fits",
    "members",
    "merged",
    "on_device",
    "read",
    "score",
    "state_of",
]
