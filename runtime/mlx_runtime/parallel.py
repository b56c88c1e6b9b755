"""What one worker knows of its group: rank, device, seeds, and models in and out of their DDP wrapper."""

import contextlib
import dis
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.exceptions
import ray.train
import ray.train.torch
import torch
from torch.nn.parallel import DistributedDataParallel

SECONDS_PER_VOTE = 0.2
"""How long a request to stop waits at the most, beside the step under way."""

MOST_STEPS_PER_VOTE = 100
"""Or a loop that slows down from one step to the next would be deaf for long."""

_RAY_LOST = (
    ray.exceptions.RayActorError,  # a reader or dealer of data, or what owned it
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
)


_GLOO = re.compile(r"\[[^\]]*\bgloo/transport/[^\]]+:\d+\] ")
"""What errors of gloo's connections begin with: the position in its source."""


@dataclass(frozen=True)
class Worker:
    """This worker's place in the group.

    Attributes:
        rank: world rank; 0 is the one that writes.
        world_size: workers in all.
        device: where its models and batches live.
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def current(cls) -> "Worker":
        """Read it from Ray Train. Only inside a training function."""
        context = ray.train.get_context()
        return cls(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())

    @property
    def writes(self) -> bool:
        return self.rank == 0


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """The state of Python's, NumPy's and torch's random numbers on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Go back to a state from `random_state`."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def rank_random_state(device: torch.device) -> dict[str, Any]:
    """The state of all random numbers that this worker draws, as plain values and tensors for a checkpoint."""
    version, numbers, gauss = random.getstate()
    name, keys, *place = np.random.get_state(legacy=True)
    state = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *place],
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_rank_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go back to a state from `rank_random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *place = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *place))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Everything seeded while the block runs, and afterwards as random as before."""
    before = random_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(before)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def agree(flags: list[bool], device: torch.device) -> list[bool | None]:
    """What all workers say to each of some questions, None where they differ; one small collective."""
    if not torch.distributed.is_initialized():
        return list(flags)
    votes = torch.tensor([[flag, not flag] for flag in flags], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return [True if yes else False if no else None for yes, no in votes.tolist()]


def shared(value: Any) -> Any:
    """The value that rank 0 gives, on every worker; a collective."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def gathered(value: Any) -> list[Any] | None:
    """The values of all workers by rank, on rank 0; None elsewhere. A collective."""
    if not torch.distributed.is_initialized():
        return [value]
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    values: list[Any] | None = [None] * world if rank == 0 else None
    torch.distributed.gather_object(value, values, dst=0)
    return values


class Vote:
    """Agrees now and then, between two steps, on what any worker has asked for. Every worker must take part.

    A vote is one small collective on the CPU; how many steps pass until the next one is part of its result, so that
    all workers wait equally long, about `SECONDS_PER_VOTE`.

    Args:
        worker: this one.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._group = torch.distributed.new_group(backend="gloo") if torch.distributed.is_initialized() else None
        self._left = 1
        self._asked_at = time.monotonic()
        self._interval = 1

    def due(self) -> bool:
        """Whether the vote is now; counts a step."""
        self._left -= 1
        return self._left <= 0

    def ask(self, wish: int) -> int:
        """The greatest wish of all workers.

        Args:
            wish: of this one, 0 for none.
        """
        present = time.monotonic()
        per_step = (present - self._asked_at) / max(1, self._interval - self._left)  # the end of an epoch asks earlier
        self._asked_at = present
        wait = int(min(MOST_STEPS_PER_VOTE, max(1.0, SECONDS_PER_VOTE / max(per_step, 1e-9))))
        if self._group is not None:
            votes = torch.tensor([wish, wait if self._worker.rank == 0 else 0])
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=self._group)
            wish, wait = votes.tolist()
        self._left = self._interval = wait
        return wish


def preempted() -> bool:
    """Whether a node of this run has notice that it goes away; all workers must ask, about 5 ms."""
    return ray.train.get_preemption_info() is not None


def lost_peer(error: BaseException) -> bool:
    """Whether an error only means that another worker is gone.

    Gloo raises plain RuntimeErrors from C++, which begin with a position in its source. Any other RuntimeError, about a
    server that refuses connections for example, is an error of the user's code.
    """
    if isinstance(error, (torch.distributed.DistError, *_RAY_LOST)):
        return True
    return type(error) is RuntimeError and _GLOO.match(str(error)) is not None and not _raised_in_python(error)


def _raised_in_python(error: BaseException) -> bool:
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False  # it came from another process, which has kept its traceback
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def unwrapped(model: Any) -> Any:
    """The model inside `prepare_model`'s DDP wrapper, so that state names carry no `module.` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model
