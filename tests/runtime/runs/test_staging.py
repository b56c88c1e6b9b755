"""Copies of states for checkpoints, on the CPU and from a GPU."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints import a_state

from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import BackgroundSaver, CheckpointStore

pytestmark = pytest.mark.pure


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU; what is made of it is not."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> "OnGpu":  # type: ignore[override]
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


class Gpu:
    """Notes what a GPU is asked for; an event happens when somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        gpu = self

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking

            def record(self, stream: str) -> None:
                gpu.calls.append(f"record on {stream}")

            def synchronize(self) -> None:
                gpu.calls.append(f"wait in {threading.current_thread().name}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def test_a_checkpoint_is_written_once_the_gpu_has_copied_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, stored = Gpu(monkeypatch), list[Any]()
    saver = BackgroundSaver(CheckpointStore(str(tmp_path)), lambda item: stored.append([*gpu.calls]), lambda: None)
    weights = on_gpu(1, 2)
    saver.save(a_state(models={"net": {"weights": weights}}), CheckpointInfo(0, True, 1, {}))
    weights.zero_()  # the next update; without a GPU, the copy was complete
    saver.wait()
    assert stored == [["record on the stream of cuda:0", "wait in checkpoint"]]
    (saved,) = CheckpointStore(str(tmp_path)).all()
    assert CheckpointStore(str(tmp_path)).load(saved)["models"]["net"]["weights"].tolist() == [1, 2]
