"""The probe of a proof: in each worker, it notes what every update has read, drawn and changed, and kills processes."""

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from mlx_runtime.distributed.randomness import GENERATORS, random_state_dict
from mlx_runtime.distributed.wrapping import unwrap, whole
from mlx_runtime.errors import USER_ERRORS
from mlx_runtime.loop.context import GROUPS, Groups
from mlx_runtime.loop.experiment import BaseModule

DRIVER = "MLX_PROOF_DRIVER"
"""Environment variable of workers: the process id of their driver."""

CHECKPOINT_S = 30.0
"""Maximum wait for the first checkpoint before a kill, which is left out then, since nothing could be restored."""

ITEMS, DEPTH, LARGE = 500, 8, 2**20
"""Limits of the search for values that checkpoints lack: items of an object, levels, and bytes of an array."""

_PLAIN = (type(None), int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor, *GENERATORS)
_SKIPPED = ("mlx_runtime", "torch.optim", "torch.distributed", "torch.utils.tensorboard", "logging", "threading")
_LIBRARIES = ("torch.", "torchmetrics.")


class Probe:
    """A callback that writes a note about each update to `rank_R.jsonl`, and kills workers and drivers.

    Args:
        folder: folder of the notes.
        plain: turn off dropout, keep BatchNorm in eval mode, and save the weights after each update.
        kills: global step, rank and victim (`worker` or `driver`) of each kill, in the order of steps.
    """

    _hook: ClassVar[Any] = None  # of the probe that was created last: a driver that trains creates two

    def __init__(self, folder: str, plain: bool = False, kills: Sequence[Sequence[Any]] = ()) -> None:
        self.folder, self.plain, self.kills = Path(folder), plain, kills
        self._read: list[str] = []  # digests of the training batches since the last update
        self._rows = 0  # in them
        self._steps: list[int] = []  # of the updates so far
        if Probe._hook is not None:
            Probe._hook.remove()
        Probe._hook = register_optimizer_step_post_hook(self._updated)

    def on_batch_start(self, experiment: BaseModule, stage: str, batch: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._read.append(digest(sorted(values(batch))))
            tensors = (item for item in tree_leaves(batch) if isinstance(item, torch.Tensor) and item.dim())
            self._rows += next(map(len, tensors), 0)
        for part in (part for model in Groups(experiment).modules for part in model.modules() if self.plain):
            if isinstance(part, _BatchNorm | _DropoutNd):
                part.eval()
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0  # type: ignore[assignment]

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an update of the loop that has just been made, and carry out the kill that is due."""
        frame = sys._getframe()
        while frame.f_code.co_name != "worker_loop":
            if frame.f_back is None:
                return
            frame = frame.f_back
        context = frame.f_locals[frame.f_code.co_varnames[0]]._run.context
        step, rank = context.progress.global_step, context.topology.rank
        self._steps.append(step)
        models = {name: unwrap(model) for name, model in context.groups.members("models").items()}
        weights = {f"{name}.{key}": item for name, model in models.items() for key, item in model.named_parameters()}
        updated = {id(item) for group in optimizer.param_groups for item in group["params"]}
        gradients = {key: item.grad for key, item in weights.items() if item.grad is not None and id(item) in updated}
        drawn = random_state_dict(context.topology.device)
        state = {"batch": digest(self._read)}
        state |= {f"random state of {key}": digest(item) for key, item in drawn.items()}
        state |= {f"gradient of {key}": digest(item) for key, item in gradients.items()}
        state |= {f"models.{key}": digest(item) for key, item in weights.items()}
        note = {"process": os.getpid(), "step": step, "number": self._steps.count(step), "rows": self._rows}
        note |= {"batches": len(self._read), "state": state}
        current = {key: whole(item.detach()).cpu() for key, item in weights.items() if not item.is_meta}
        note["finite"] = all(bool(item.isfinite().all()) for item in current.values())
        if self.plain and rank == 0:
            torch.save(current, self.folder / f"weights_{len(self._steps):04}.pt")
        hidden: dict[str, str] = {}
        with contextlib.suppress(*USER_ERRORS):  # other threads may change what is searched
            hidden = dict(unsaved(context.groups))
        with (self.folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write("\n" + json.dumps({**note, "hidden": hidden}))  # a kill may have cut off the note before
        self._read, self._rows = [], 0
        for at, of_rank, victim in self.kills:
            if (at, of_rank) == (step, rank):
                self._kill(step, victim, Path(context.folder.checkpoints))

    def _kill(self, step: int, victim: str, checkpoints: Path) -> None:
        """Carry out a kill, once: a later attempt repeats the step."""
        done, deadline = self.folder / f"killed_{step}", time.monotonic() + CHECKPOINT_S
        while not (saved := any(checkpoints.glob("[!.]*"))) and time.monotonic() < deadline:
            time.sleep(0.01)
        if done.exists() or not saved:
            return
        done.touch()
        os.kill(int(os.environ[DRIVER]) if victim == "driver" else os.getpid(), signal.SIGKILL)
        time.sleep(CHECKPOINT_S)  # this process ends with its driver


def digest(value: Any) -> str:
    """Return a text that differs if a value differs in any bit: short values as they are, and hashes of others."""
    if isinstance(value, GENERATORS):
        own: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        state = getattr(own, "getstate", getattr(own, "get_state", lambda: own.state))
        return f"generator {digest(state())}"
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "meta"  # a part of a model that another worker holds
        part = whole(value.detach()).to_dense().cpu().flatten().contiguous()
        if len(part) == 1:
            return repr(part.item())
        text = f"{tuple(value.shape)} {value.dtype} {_hash(part.view(torch.uint8).numpy() if len(part) else b'')}"
    elif isinstance(value, np.ndarray):
        text = f"{value.shape} {value.dtype} {_hash(value.tobytes())}"
    else:
        text = str([digest(item) for item in value]) if isinstance(value, list | tuple) else repr(value)
    return text if len(text) < 60 else _hash(text.encode())


def _hash(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def unsaved(groups: Groups) -> Iterator[tuple[str, str]]:
    """Yield the values that an update may depend on, besides parameters and buffers, with their digests.

    They are the attributes of the objects of an experiment and of the objects in them, and the variables of its
    modules.
    """
    searched = [name for name in GROUPS if name not in ("cfg", "optimizers")]
    found = {f"{group}.{name}": item for group in searched for name, item in groups.members(group).items()}
    found |= {f"self.{name}": item for name, item in vars(groups.experiment).items() if name not in GROUPS}
    package = type(groups.experiment).__module__.partition(".")[0]
    for title, module in [*sys.modules.items()]:
        if title.partition(".")[0] == package:
            found |= {f"{title}.{name}": item for name, item in vars(module).items() if not name.startswith("__")}
    seen: set[int] = set()
    for name, item in found.items():
        yield from values(item, name, seen, DEPTH)


def values(
    item: Any, name: str = "", seen: set[int] | None = None, depth: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the names and digests of all values in an object, each object once; with a `depth`, within the limits."""
    item = unwrap(item)
    seen, kind = set() if seen is None else seen, type(item)
    if isinstance(item, _PLAIN):
        large = depth is not None and (size := getattr(item, "nbytes", 0)) > LARGE
        yield name, f"{kind.__name__} of {size} bytes" if large else digest(item)
    elif id(item) not in seen and not (depth == 0 or (depth and kind.__module__.startswith(_SKIPPED))):
        seen.add(id(item))
        inner: Any = {} if isinstance(item, type | ModuleType | FunctionType) else getattr(item, "__dict__", {}).items()
        if isinstance(item, dict | list | tuple | deque):
            inner = item.items() if isinstance(item, dict) else enumerate(item)
        elif isinstance(item, nn.Module):
            kept = {*item.state_dict(keep_vars=True), *vars(nn.Module()), "training"}
            inner = [*inner, *item._buffers.items(), *item._modules.items()]
            inner = [(key, part) for key, part in inner if key not in kept]
        elif isinstance(item, set | frozenset):
            inner = enumerate(sorted(map(digest, item)))
        elif not hasattr(item, "__dict__") and depth is None:
            yield name, re.sub(" at 0x[0-9a-f]+", "", repr(item))
        for key, part in islice(inner, depth and ITEMS):
            if not (str(key).startswith("_") and kind.__module__.startswith(_LIBRARIES)):
                yield from values(part, f"{name}.{key}".lstrip("."), seen, depth and depth - 1)
