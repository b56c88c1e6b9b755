"""Where the time of training steps goes: a trace of a few of them, and the operators that took longest."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from mlx_runtime.errors import StorageError, first_line
from mlx_runtime.layout import RunFolder
from mlx_runtime.storage import joined

WAIT, WARMUP, ACTIVE = 1, 1, 5
"""Training steps that are passed over, since they are slower than others, that warm the profiler up, and that are
traced."""

OPERATORS = 10
"""How many are told about."""


class Profile:
    """Traces the first training steps of this process while the block runs. For rank 0.

    Args:
        folder: of the run; gets `profile/step_00000003.pt.trace.json`, which Perfetto and TensorBoard open.
        device: whose work is traced beside that of the CPU.
        tell: takes lines for the user.
    """

    def __init__(self, folder: RunFolder, device: torch.device, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._steps = self._first = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # below it writes a line about each start and stop
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler: Any = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._store,
        )

    def __enter__(self) -> "Profile":
        self._profiler.start()
        return self

    def step(self, number: int) -> None:
        """A training step is over.

        Args:
            number: of the step in the whole run, from 1.
        """
        if self._profiler is None:
            return
        self._steps += 1
        if self._steps == WAIT + WARMUP:
            self._first = number + 1
        with _native_errors_hidden() if self._steps == WAIT else contextlib.nullcontext():
            self._profiler.step()
        if self._steps == WAIT + WARMUP + ACTIVE:
            self._stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._steps <= WAIT + WARMUP:
            self._tell(f"profile   nothing: the first {WAIT + WARMUP} training steps are not traced, and no other came")

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _store(self, profiler: Any) -> None:
        """Write the trace, and tell where it is and what it shows."""
        if self._steps <= WAIT + WARMUP:
            return
        file = self._folder.path / "profile" / f"step_{self._first:08d}.pt.trace.json"
        try:
            file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
            self._folder.push(file, must=True)
        except (OSError, RuntimeError, StorageError) as error:
            self._tell(f"profile   the trace cannot be stored: {first_line(error)}")
        else:
            place = joined(self._folder.place, "profile", file.name)
            self._tell(f"profile   {place}; open it in https://ui.perfetto.dev")
        self._tell("\n".join(_table(profiler.key_averages())))


@contextlib.contextmanager
def _native_errors_hidden() -> Iterator[None]:
    """Without what libraries write to file 2: Kineto calls it an error to be set up outside the main thread."""
    before = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _table(operators: Any) -> list[str]:
    """The operators that took longest, without those that they called; kernels count for what has started them."""
    on_gpu = any(item.self_device_time_total for item in operators)
    took = {
        item.key: (item.self_device_time_total if on_gpu else item.self_cpu_time_total, item.count)
        for item in operators
        if item.device_type == DeviceType.CPU and not item.key.startswith("ProfilerStep")
    }
    total = sum(microseconds for microseconds, _ in took.values()) or 1
    longest = sorted(took, key=lambda key: took[key], reverse=True)[:OPERATORS]
    width = max(map(len, longest), default=0)
    where = "GPU" if on_gpu else "CPU"
    return [f"{'':<10}{'':<{width}}  {where + ' ms':>9}  share  calls"] + [
        f"{'':<10}{key:<{width}}  {took[key][0] / 1000:>9.2f}  {took[key][0] / total:>5.0%}  {took[key][1]:>5}"
        for key in longest
    ]
