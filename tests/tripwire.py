"""A fake machine with four GPUs, on which any use of CUDA raises an error, as in a forked process.

Counting GPUs is allowed, because NVML does not need CUDA for it.
"""

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace functions of `torch.cuda` in this process, and in those that it forks."""

    def available() -> bool:
        return os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    def initialize() -> NoReturn:
        raise RuntimeError(f"process {os.getpid()} has touched CUDA")

    replace(torch.cuda, "is_available", available)
    for module in (torch.cuda, torch.cuda.random):
        replace(module, "device_count", lambda: 4 * available())
        replace(module, "_lazy_init", initialize)
