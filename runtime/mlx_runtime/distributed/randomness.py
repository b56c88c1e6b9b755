"""Seeds and states of the random number generators of Python, NumPy and torch."""

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on all devices. Runs do so with `cfg.seed`."""
    seed_on_cpu(seed)
    torch.manual_seed(seed)


def seed_on_cpu(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""Types of random generators that objects may have of their own."""


def seed_generators(generators: Iterable[Any], seed: int) -> None:
    """Seed generators of these types, each in another way."""
    for number, item in enumerate(generators, start=seed):
        if isinstance(item, np.random.Generator):
            item.bit_generator.state = type(item.bit_generator)(number).state
        elif isinstance(item, torch.Generator):
            item.manual_seed(number)
        else:
            item.seed(number % 2**32)


def random_state() -> tuple[Any, ...]:
    """Return the states of the generators on the CPU, for `set_random_state`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restore states from `random_state`."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed everything inside the block, and restore all states after it.

    Generators of GPUs are included only if this process already uses CUDA, which must not be initialized here: a
    driver could no longer fork workers, and it would fail in a process that was forked to read samples.
    """
    before = random_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    if on_gpus is not None:
        torch.cuda.manual_seed_all(seed)
    seed_on_cpu(seed)
    try:
        yield
    finally:
        set_random_state(before)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def random_state_dict(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that this worker uses, as plain values and tensors for a checkpoint."""
    version, numbers, gauss = random.getstate()
    name, keys, *position = np.random.get_state(legacy=True)
    state = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position],
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def load_random_state_dict(state: dict[str, Any], device: torch.device) -> None:
    """Restore states from `random_state_dict`."""
    version, numbers, gauss = state["python"]
    name, keys, *position = state["numpy"]
    python = version, tuple(numbers.tolist()), gauss
    set_random_state((python, (name, keys.numpy().astype(np.uint32), *position), state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
