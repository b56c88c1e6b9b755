"""`cfg.debug.profile`: a trace of a few training steps, and a table of the operators that took the most time."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import join_path

WAIT, WARMUP, ACTIVE = 1, 1, 5
"""Numbers of training steps: skipped, because the first is slow; to warm up the profiler; traced."""

OPERATORS = 10
"""Rows of the table."""


@contextlib.contextmanager
def trace(folder: RunFolder, device: torch.device, notify: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Trace the first training steps in the block on the CPU and a device. Rank 0 only.

    Yields a function to call with the global step after each training step. The trace is stored as
    `profile/step_00000003.pt.trace.json` of the run, for Perfetto and TensorBoard.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto logs each start and stop
    on_cpu = device.type == "cpu"
    steps: list[int] = []

    def store(trace: Any) -> None:
        if len(steps) <= WAIT + WARMUP:
            return
        file = folder.path / "profile" / f"step_{steps[WAIT + WARMUP - 1] + 1:08d}.pt.trace.json"
        try:
            file.parent.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(file))
            folder.push(file, must=True)
        except (OSError, RuntimeError, StorageError) as error:
            notify(f"profile   the trace could not be stored: {short_message(error)}")
        else:
            location = join_path(folder.location, "profile", file.name)
            notify(f"profile   {location}; open it in https://ui.perfetto.dev")
        order = "self_cpu_time_total" if on_cpu else "self_device_time_total"
        table = trace.key_averages().table(sort_by=order, row_limit=OPERATORS, max_name_column_width=40)
        notify(table.rstrip())

    def step(number: int) -> None:
        if len(steps) < WAIT + WARMUP + ACTIVE:
            steps.append(number)
            profiler.step()
            if len(steps) == WAIT + WARMUP + ACTIVE:
                profiler.stop()

    profiler: Any = profile(
        activities=[ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=store,
    )
    profiler.start()
    try:
        yield step
    finally:
        if len(steps) < WAIT + WARMUP + ACTIVE:
            profiler.stop()
        if len(steps) <= WAIT + WARMUP:
            notify(f"profile   empty: the run ended within the first {WAIT + WARMUP} steps, which are not traced")
