"""The probe of a proof: in each worker, it notes what every update has read, drawn and changed, and kills processes."""

import hashlib
import json
import os
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

from mlx_runtime.distributed.randomness import GENERATORS, random_state_dict
from mlx_runtime.distributed.wrapping import unwrap, whole
from mlx_runtime.loop.context import GROUPS, Groups
from mlx_runtime.loop.experiment import BaseModule

DRIVER = "MLX_PROOF_DRIVER"
"""Environment variable of workers: the process id of their driver."""

KEPT = 3
"""Number of updates whose gradients are kept, to compare different numbers of workers."""

CHECKPOINT_S = 30.0
"""Maximum wait for the first checkpoint before a kill."""

ITEMS, DEPTH = 500, 8
"""Limits of the objects in which values are searched that checkpoints lack."""

LOCAL = "local variable "
"""Beginning of the names of such variables among these values."""

_PLAIN = (type(None), int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor, *GENERATORS)
_SKIPPED = ("mlx_runtime", "torch.optim", "torch.distributed", "torch.utils.tensorboard", "logging", "threading")
_LIBRARIES = ("torch.", "torchmetrics.")


class Probe:
    """A callback that writes a note about each update to `rank_R.jsonl`, and kills workers and drivers.

    Args:
        folder: folder of the notes.
        plain: turn off dropout, keep BatchNorm in eval mode, and keep the gradients of the first updates.
        kills: global step, rank and victim (`worker` or `driver`) of each kill, in the order of steps.
    """

    _hook: ClassVar[Any] = None  # of the probe that was created last: a driver that trains creates two

    def __init__(self, folder: str, plain: bool = False, kills: Sequence[Sequence[Any]] = ()) -> None:
        self.folder, self.plain, self.kills = Path(folder), plain, kills
        self._read, self._rows = hashlib.blake2b(), 0  # training batches since the last update
        self._steps: list[int] = []  # of the updates so far
        if Probe._hook is not None:
            Probe._hook.remove()
        Probe._hook = register_optimizer_step_post_hook(lambda *_: self._updated())

    def on_batch_start(self, experiment: BaseModule, stage: str, batch: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._read.update(str({name: digest(batch[name]) for name in sorted(batch)}).encode())
            self._rows += next((len(item) for item in batch.values() if hasattr(item, "__len__")), 0)
        for part in (part for model in Groups(experiment).modules for part in model.modules() if self.plain):
            if isinstance(part, _BatchNorm | _DropoutNd):
                part.eval()
            elif isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0  # type: ignore[assignment]

    def _updated(self) -> None:
        """Note an update of the loop that has just been made, and carry out the kill that is due."""
        frame = sys._getframe()
        while frame.f_code.co_name != "worker_loop":
            if frame.f_back is None:
                return
            frame = frame.f_back
        local = frame.f_locals
        context = local[frame.f_code.co_varnames[0]]._run.context
        step, rank = context.progress.global_step, context.topology.rank
        self._steps.append(step)
        models = {name: unwrap(model) for name, model in context.groups.members("models").items()}
        weights = {f"{name}.{key}": item for name, model in models.items() for key, item in model.named_parameters()}
        gradients = {key: whole(item.grad).to_dense() for key, item in weights.items() if item.grad is not None}
        drawn = random_state_dict(context.topology.device)
        state = {"batch": self._read.hexdigest()[:16]}
        state |= {f"random state of {key}": digest(item) for key, item in drawn.items()}
        state |= {f"gradient of {key}": digest(item) for key, item in gradients.items()}
        state |= {f"models.{key}": digest(item) for key, item in weights.items()}
        note = {"process": os.getpid(), "step": step, "number": self._steps.count(step), "rows": self._rows}
        note |= {"state": state, "hidden": dict(unsaved(context.groups, local))}
        with (self.folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        self._read, self._rows = hashlib.blake2b(), 0
        if self.plain and rank == 0 and len(self._steps) <= KEPT:
            kept = {key: item.float().cpu().clone() for key, item in gradients.items()}
            torch.save(kept, self.folder / f"gradients_{len(self._steps)}.pt")
        for at, of_rank, victim in self.kills:
            if (at, of_rank) == (step, rank):
                self._kill(step, victim, Path(context.folder.checkpoints))

    def _kill(self, step: int, victim: str, checkpoints: Path) -> None:
        """Carry out a kill, once: a later attempt repeats the step."""
        done, deadline = self.folder / f"killed_{step}", time.monotonic() + CHECKPOINT_S
        if done.exists():
            return
        while not any(checkpoints.glob("[!.]*")) and time.monotonic() < deadline:  # otherwise, nothing is restored
            time.sleep(0.01)
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


def unsaved(groups: Groups, local: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values that an update may depend on, besides parameters and buffers, with their digests.

    They are the attributes of the objects of an experiment and of the objects in them, the variables of its modules,
    and numbers and generators among the `local` variables of its loop.
    """
    searched = [name for name in GROUPS if name not in ("cfg", "optimizers")]
    found = {f"{group}.{name}": item for group in searched for name, item in groups.members(group).items()}
    found |= {f"self.{name}": item for name, item in vars(groups.experiment).items() if name not in GROUPS}
    package = type(groups.experiment).__module__.partition(".")[0]
    for title, module in [item for item in sys.modules.items() if item[0].partition(".")[0] == package]:
        found |= {f"{title}.{name}": item for name, item in vars(module).items() if not name.startswith("__")}
    numbers = {name: item for name, item in local.items() if isinstance(item, (int, float, *GENERATORS))}
    found |= {f"{LOCAL}{name}": item for name, item in numbers.items()}
    seen: set[int] = set()
    for name, item in found.items():
        yield from values(item, name, seen, ITEMS)


def values(item: Any, name: str, seen: set[int], items: int | None = None, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the names and digests of the values in an object, each object once; of long ones, the first `items`."""
    item = unwrap(item)
    kind = type(item)
    if isinstance(item, _PLAIN):
        yield name, digest(item)
    elif id(item) not in seen and depth < DEPTH and not kind.__module__.startswith(_SKIPPED):
        seen.add(id(item))
        inner: Any = {} if isinstance(item, type | ModuleType | FunctionType) else getattr(item, "__dict__", {}).items()
        if isinstance(item, dict | list | tuple | deque):
            inner = item.items() if isinstance(item, dict) else enumerate(item)
        elif isinstance(item, nn.Module):
            kept = {*item.state_dict(keep_vars=True), *vars(nn.Module()), "training"}
            inner = [*inner, *item._buffers.items(), *item._modules.items()]
            inner = [(key, part) for key, part in inner if key not in kept]
        for key, part in islice(inner, items):
            if not (str(key).startswith("_") and kind.__module__.startswith(_LIBRARIES)):
                yield from values(part, f"{name}.{key}".lstrip("."), seen, items, depth + 1)
