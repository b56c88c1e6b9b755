"""The probe of a proof: in each worker, it notes what every update has read, drawn and changed, and kills processes."""

import collections
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import register_optimizer_step_post_hook

from mlx_runtime.distributed import randomness
from mlx_runtime.distributed.wrapping import unwrap, whole
from mlx_runtime.events import RunInfo
from mlx_runtime.loop.context import Groups
from mlx_runtime.loop.experiment import BaseModule

ELEMENTS = 1_000_000
"""Number of elements of a tensor that are compared at each update; checkpoints are compared whole."""

ITEMS, DEPTH = 500, 8
"""Limits of the objects that are searched for values which checkpoints lack."""

KEPT = 3
"""Number of updates whose gradients are kept, to compare different numbers of workers."""

CHECKPOINT_S = 30.0
"""Maximum wait for the first checkpoint before a kill."""

KILLS, DRIVER = "kills.json", "driver.pid"

_SEARCHED = ("datasets", "models", "losses", "metrics", "tools")
_OF_MODULES = {*vars(nn.Module()), "training"}
_LIBRARIES = ("torch.", "torchmetrics.", "numpy.")
_SKIPPED = ("mlx_runtime", "torch.optim", "torch.distributed", "torch.utils.tensorboard", "logging", "threading")


class Probe:
    """A callback that writes a note about each update to `rank_R.jsonl`, and carries out the kills of `kills.json`.

    Args:
        folder: folder of the notes and the run.
        plain: turn off dropout, keep BatchNorm in eval mode, and keep the gradients of the first updates.
    """

    _hook: ClassVar[Any] = None  # of the probe that was created last: a driver that trains creates two

    def __init__(self, folder: str, plain: bool = False) -> None:
        self.folder, self.plain = Path(folder), plain
        self._read: dict[str, Any] = {}  # digest of all batches of a stage
        self._rows = 0
        self._updates: collections.Counter[int] = collections.Counter()  # by global step
        if Probe._hook is not None:
            Probe._hook.remove()
        Probe._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._updated(optimizer))

    def on_run_start(self, run: RunInfo) -> None:
        """Note the process of the driver, where this is called."""
        (self.folder / DRIVER).write_text(str(os.getpid()))

    def on_batch_start(self, experiment: BaseModule, stage: str, batch: Mapping[str, Any]) -> None:
        seen = self._read.setdefault(stage, hashlib.blake2b())
        for name, values in sorted(batch.items()):
            seen.update(f"{name} {digest(values)}".encode())
        self._rows += next((len(values) for values in batch.values() if hasattr(values, "__len__")), 0)
        if self.plain:
            for part in (part for model in Groups(experiment).modules for part in model.modules()):
                if isinstance(part, _BatchNorm | _DropoutNd):
                    part.eval()
                if isinstance(getattr(part, "dropout", None), float):
                    part.dropout = 0.0  # type: ignore[assignment]

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an update that has just been made, and kill this process or its driver if that is due."""
        frames = [*_frames(sys._getframe())]
        experiment = next((own for frame in frames if isinstance(own := frame.f_locals.get("self"), BaseModule)), None)
        if experiment is None or (session := experiment._run) is None:
            return
        step, rank = session.progress.global_step, session.context.topology.rank
        self._updates[step] += 1
        models = {name: unwrap(model) for name, model in session.context.groups.members("models").items()}
        named = {f"{name}.{key}": item for name, model in models.items() for key, item in model.named_parameters()}
        mine = {id(item) for group in optimizer.param_groups for item in group["params"]}
        found = {f"gradients.{key}": item.grad for key, item in named.items() if id(item) in mine}
        state = {f"batches of {stage}": seen.hexdigest()[:12] for stage, seen in self._read.items()}
        drawn = randomness.random_state_dict(session.context.topology.device)
        state |= {f"random state of {name}": digest(value) for name, value in drawn.items()}
        state |= {key: digest(item) for key, item in found.items() if item is not None}
        state |= {f"models.{key}": digest(item) for key, item in named.items()}
        hidden = dict(unsaved(session.context.groups, experiment, frames))
        note = {"process": os.getpid(), "step": step, "number": self._updates[step], "rows": self._rows}
        with (self.folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps(note | {"state": state, "hidden": hidden}) + "\n")
        self._rows = 0
        if self.plain and sum(self._updates.values()) <= KEPT:
            kept = {key: whole(item).float().cpu().clone() for key, item in found.items() if item is not None}
            if rank == 0:
                torch.save(kept, self.folder / f"gradients_{sum(self._updates.values())}.pt")
        self._kill(step, rank, Path(session.context.folder.checkpoints))

    def _kill(self, step: int, rank: int, checkpoints: Path) -> None:
        """Carry out the kill of this worker at a step, once: a later attempt repeats the step."""
        file = self.folder / KILLS
        kills = json.loads(file.read_text()) if file.exists() else []
        for number, kill in enumerate(kills):
            done = self.folder / f"killed_{number}"
            if (kill["step"], kill["rank"]) != (step, rank) or done.exists():
                continue
            deadline = time.monotonic() + CHECKPOINT_S
            while not any(checkpoints.glob("[!.]*")) and time.monotonic() < deadline:  # else, nothing is restored
                time.sleep(0.01)
            done.touch()
            os.kill(
                os.getpid() if kill["victim"] == "worker" else int((self.folder / DRIVER).read_text()), signal.SIGKILL
            )
            time.sleep(CHECKPOINT_S)  # the death of its driver ends this process, too


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def digest(value: Any) -> str:
    """Return a short text that differs if a value differs: numbers as they are, and hashes of anything longer."""
    if isinstance(value, torch.Tensor):
        part = whole(value.detach()).flatten()[:ELEMENTS].contiguous().cpu()
        content = part.view(torch.uint8).numpy().tobytes() if part.numel() else b""
        if value.numel() == 1:
            return repr(part.item())
        return f"{tuple(value.shape)} {hashlib.blake2b(content, digest_size=6).hexdigest()}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return digest(torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()))
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        value = [digest(item) for item in value]
    text = repr(value)
    return text if len(text) <= 40 else hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def unsaved(groups: Groups, experiment: BaseModule, frames: list[FrameType]) -> Iterator[tuple[str, str]]:
    """Yield the values that an update may depend on, besides parameters and buffers, with their digests.

    They are attributes of the objects of an experiment and of the objects in them, numbers and generators of its
    modules, and local variables of its loop.
    """
    seen: set[int] = set()
    for group in _SEARCHED:
        for name, item in groups.members(group).items():
            yield from _values(unwrap(item), f"{group}.{name}", seen)
    for name, item in vars(experiment).items():
        if name not in (*_SEARCHED, "cfg", "optimizers"):
            yield from _values(item, f"self.{name}", seen)
    package = type(experiment).__module__.partition(".")[0]
    for title, module in list(sys.modules.items()):
        if title.partition(".")[0] == package:
            for name, item in list(vars(module).items()):
                if not name.startswith("__"):
                    yield from _values(item, f"{title}.{name}", seen, DEPTH - 1)
    loop = next((frame for frame in frames if frame.f_code.co_name == "worker_loop"), None)
    for name, item in (loop.f_locals if loop is not None else {}).items():
        if isinstance(item, (*randomness.GENERATORS, int, float, torch.Tensor)):
            yield f"local variable {name} of worker_loop", _content(item)


def _values(item: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the values in an object by name, each object once."""
    kind = type(item)
    if isinstance(item, type | ModuleType | FunctionType) or kind.__module__.startswith(_SKIPPED):
        return
    plain = item is None or isinstance(item, bool | int | float | complex | str | bytes | np.generic | np.ndarray)
    if plain or isinstance(item, (torch.Tensor, *randomness.GENERATORS)):
        yield name, _content(item)
        return
    if id(item) in seen or depth > DEPTH:
        return
    seen.add(id(item))
    if isinstance(item, dict | list | tuple | set | collections.deque):
        parts = item.items() if isinstance(item, dict) else enumerate(item)
        inner = {f"{name}[{key!r}]": part for (key, part), _ in zip(parts, range(ITEMS), strict=False)}
        inner[f"len({name})"] = len(item)
    elif isinstance(item, nn.Module):
        kept = item.state_dict(keep_vars=True)
        inner = {key: part for key, part in vars(item).items() if key not in _OF_MODULES}
        inner |= {key: part for key, part in item._buffers.items() if key not in kept} | item._modules
        inner = {f"{name}.{key}": part for key, part in inner.items() if _is_own(kind, key)}
    else:
        inner = {f"{name}.{key}": part for key, part in getattr(item, "__dict__", {}).items() if _is_own(kind, key)}
    for key, part in inner.items():
        yield from _values(part, key, seen, depth + 1)


def _is_own(kind: type, attribute: str) -> bool:
    """Return False for the private attributes of libraries, such as caches."""
    return not (attribute.startswith("_") and kind.__module__.startswith(_LIBRARIES))


def _content(item: Any) -> str:
    """Return the digest of a value; that of a random generator begins with `generator`."""
    if isinstance(item, torch.Generator):
        return f"generator {digest(item.get_state())}"
    if isinstance(item, np.random.Generator):
        return f"generator {digest(repr(item.bit_generator.state))}"
    if isinstance(item, random.Random | np.random.RandomState):
        return f"generator {digest(repr(item.getstate() if isinstance(item, random.Random) else item.get_state()))}"
    return digest(item)
