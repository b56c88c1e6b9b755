"""`cfg.profile`: a trace of a few training steps, and a table of the operators that took the most time."""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import joined

WAIT, WARMUP, ACTIVE = 1, 1, 5
"""Number of training steps that are skipped, because the first is slow; that warm up the profiler; that are traced."""

OPERATORS = 10
"""Rows of the table."""


class Profiler:
    """Traces the first training steps of this process inside the block, on the CPU and a device. Rank 0 only.

    The trace is stored as `profile/step_00000003.pt.trace.json` of the run, for Perfetto and TensorBoard.
    """

    def __init__(self, folder: RunFolder, device: torch.device, notify: Callable[[str], None]) -> None:
        self._folder, self._notify = folder, notify
        self._device = "CPU" if device.type == "cpu" else "CUDA"
        self._steps = self._first = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto logs each start and stop
        self._profile: Any = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device == "CUDA" else [])],
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._store,
        )

    def __enter__(self) -> "Profiler":
        self._profile.start()
        return self

    def step(self, number: int) -> None:
        """Count a finished training step, given its global step, from 1."""
        if self._profile is None:
            return
        self._steps += 1
        if self._steps == WAIT + WARMUP:
            self._first = number + 1
        self._profile.step()
        if self._steps == WAIT + WARMUP + ACTIVE:
            self._stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if not self._traced:
            self._notify(f"profile   empty: the run ended within the first {WAIT + WARMUP} steps, which are not traced")

    @property
    def _traced(self) -> bool:
        return self._steps > WAIT + WARMUP

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _store(self, profile: Any) -> None:
        if not self._traced:
            return
        file = self._folder.path / "profile" / f"step_{self._first:08d}.pt.trace.json"
        try:
            file.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(file))
            self._folder.push(file, must=True)
        except (OSError, RuntimeError, StorageError) as error:
            self._notify(f"profile   the trace could not be stored: {short_message(error)}")
        else:
            location = joined(self._folder.location, "profile", file.name)
            self._notify(f"profile   {location}; open it in https://ui.perfetto.dev")
        order = "self_cpu_time_total" if self._device == "CPU" else "self_device_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=OPERATORS, max_name_column_width=40)
        self._notify(table.rstrip())
