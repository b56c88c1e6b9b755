"""The probe of a proof: in each worker, it notes what every update has read, drawn and changed, and kills processes."""

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from mlx_runtime.distributed.randomness import GENERATORS, random_state_dict
from mlx_runtime.distributed.wrapping import unwrap, whole
from mlx_runtime.loop.context import GROUPS, Groups, params_of

DRIVER = "MLX_PROOF_DRIVER"
"""Environment variable of workers: the process id of their driver."""

ITEMS, DEPTH, LARGE = 500, 10, 2**20
"""Limits of the search for values that checkpoints lack: items of an object, levels, and bytes of an array."""

_RANDOM = torch.nn.modules.batchnorm._BatchNorm | torch.nn.modules.dropout._DropoutNd
"""Modules that depend on the rows of this worker, or on its random numbers."""

_PLAIN = (
    *(type(None), int, float, complex, str, bytes, set, frozenset),
    *(np.generic, np.ndarray, torch.Tensor, *GENERATORS),
)
_SKIPPED = ("mlx_runtime", "torch.optim", "torch.distributed", "torch.utils.tensorboard", "logging", "threading")
_LIBRARIES = ("torch.", "torchmetrics.")

_hash = partial(hashlib.blake2b, digest_size=8)


class Probe:
    """A callback that writes a note about each update to `rank_R.jsonl`, and kills workers and drivers.

    Args:
        folder: folder of the notes.
        plain: turn off dropout, keep BatchNorm in eval mode, and save the weights after each update.
        kills: global step, rank and victim (`worker` or `driver`) of each kill, in the order of steps.
    """

    def __init__(self, folder: str, plain: bool = False, kills: Sequence[Sequence[Any]] = ()) -> None:
        self.folder, self.plain, self.kills = Path(folder), plain, kills
        self._read: list[str] = []  # digests of the training batches since the last update
        self._rows: list[str] = []  # digests of the rows in them, without zeros, which may pad them
        self._steps: list[int] = []  # of the updates so far
        self._searched: int | None = -1  # step of the checkpoint after which hidden values were noted last

    def on_batch_start(self, experiment: Any, stage: str, batch: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._read.append(digest(tree_leaves(dict(batch))))
            columns = [item for item in batch.values() if isinstance(item, torch.Tensor) and item.ndim]
            rows = zip(*columns, strict=False) if self.plain else ()
            self._rows += [digest([item[item != 0] for item in row]) for row in rows]
        for part in (part for model in Groups(experiment).modules for part in model.modules() if self.plain):
            if isinstance(part, _RANDOM):
                part.eval()
            elif isinstance(getattr(part, "dropout", None), float):  # of nn.LSTM, for example
                part.dropout = 0.0  # type: ignore[assignment]

    def on_update(self, experiment: Any, optimizer: torch.optim.Optimizer) -> None:
        """Note an update, and carry out the kill that is due."""
        context, saved = experiment._run.context, experiment._run.checkpoints.step
        step, rank = context.progress.global_step, context.topology.rank
        self._steps.append(step)
        drawn = random_state_dict(context.topology.device)
        state = {"batch": str(self._read)} | {f"random state of {key}": digest(item) for key, item in drawn.items()}
        models = {name: unwrap(model).named_parameters() for name, model in context.groups.members("models").items()}
        held = {f"models.{name}.{key}": item for name, items in models.items() for key, item in items}
        weights = {key: whole(item.detach()).cpu() for key, item in held.items() if not item.is_meta}
        state |= {key: digest(item) for key, item in weights.items()}
        norms = [float(whole(item.grad).norm()) for item in params_of(optimizer) if item.grad is not None]
        hidden: dict[str, str] = {}
        if saved != self._searched:  # a run may be resumed here
            with contextlib.suppress(Exception):  # other threads may change what is searched
                hidden = unsaved(context.groups)
        note: dict[str, Any] = {"step": step, "number": self._steps.count(step), "saved": saved}
        note |= {"gradient": math.hypot(*norms), "rows": self._rows, "state": state, "hidden": hidden}
        with (self.folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write("\n" + json.dumps(note))  # a kill may have cut off the note before
        if self.plain and rank == 0:
            torch.save(weights, self.folder / f"weights_{len(self._steps):04}.pt")
        self._read, self._rows, self._searched = [], [], saved
        for at, of_rank, victim in self.kills:
            done = self.folder / f"killed_{at}"  # a later attempt repeats the step
            if (at, of_rank) == (step, rank) and not done.exists():
                while not any(Path(context.folder.checkpoints).glob("[!.]*")):  # it is written in the background
                    time.sleep(0.01)
                done.touch()
                os.kill(int(os.environ[DRIVER]) if victim == "driver" else os.getpid(), signal.SIGKILL)
                time.sleep(60)  # this process ends with its driver


def digest(value: Any) -> str:
    """Return a text that differs if a value differs in any bit: short values as they are, and hashes of others."""
    if isinstance(value, GENERATORS):
        own: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        state = getattr(own, "getstate", getattr(own, "get_state", lambda: own.state))
        return f"generator {digest(state())}"
    if isinstance(value, torch.Tensor):
        part = value.detach().to_dense().cpu().flatten().contiguous()
        text = f"{tuple(value.shape)} {value.dtype} {_hash(part.view(torch.uint8).numpy().data).hexdigest()}"
    elif isinstance(value, np.ndarray):
        text = f"{value.shape} {value.dtype} {_hash(value.tobytes()).hexdigest()}"
    elif isinstance(value, list | tuple | set | frozenset):
        text = str([*map(digest, sorted(value, key=repr) if isinstance(value, set | frozenset) else value)])
    else:
        text = repr(value)
    return text if len(text) < 60 else _hash(text.encode()).hexdigest()


def unsaved(groups: Groups) -> dict[str, str]:
    """Return the values that an update may depend on, besides parameters and buffers, with their digests by name.

    They are the attributes of the objects of an experiment and of the objects in them, and the variables of its
    modules.
    """
    found = {name: groups.members(name) for name in GROUPS if name not in ("cfg", "optimizers")}
    found["self"] = {name: item for name, item in vars(groups.experiment).items() if name not in GROUPS}
    package = type(groups.experiment).__module__.partition(".")[0]
    for name in [name for name in [*sys.modules] if name.partition(".")[0] == package]:
        found[name] = {key: item for key, item in vars(sys.modules[name]).items() if not key.startswith("__")}
    return dict(values(found, "", set(), DEPTH))


def values(item: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    """Yield the names and digests of the values in an object, each object once, within the limits."""
    item = unwrap(item)
    kind = type(item)
    if isinstance(item, _PLAIN):
        size = getattr(item, "nbytes", 0)
        yield name, f"{kind.__name__} of {size} bytes" if size > LARGE else digest(item)
    elif depth and id(item) not in seen and not kind.__module__.startswith(_SKIPPED):
        seen.add(id(item))
        inner = {} if isinstance(item, type | ModuleType | FunctionType) else {**getattr(item, "__dict__", {})}
        if isinstance(item, dict | list | tuple | deque):
            inner |= item if isinstance(item, dict) else dict(enumerate(islice(item, ITEMS)))
        elif isinstance(item, torch.nn.Module):
            kept = {*item.state_dict(keep_vars=True), *vars(torch.nn.Module()), "training"}
            inner = {key: part for key, part in (inner | item._buffers | item._modules).items() if key not in kept}
        for key, part in [*inner.items()][:ITEMS]:
            if not (str(key).startswith("_") and kind.__module__.startswith(_LIBRARIES)):
                yield from values(part, f"{name}.{key}".lstrip("."), seen, depth - 1)
