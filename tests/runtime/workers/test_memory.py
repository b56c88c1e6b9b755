"""A worker that runs out of memory reports the settings that save some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx

from mlx_runtime.errors import WorkerLoopError
from mlx_runtime.workers.worker import SAVE_MEMORY, loop_errors, out_of_memory

FULL = 1 << 50
"""Bytes that no machine has."""


def fail_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.pure
class TestErrors:
    @pytest.mark.parametrize(
        "fail",
        [
            lambda: torch.empty(FULL),
            lambda: bytearray(FULL),
            fail_on_a_gpu,
        ],
        ids=["torch", "python", "gpu"],
    )
    def test_kinds(self, fail: Callable[[], Any]) -> None:
        with pytest.raises(Exception) as error:  # noqa: PT011 - any of them
            fail()
        assert out_of_memory(error.value)

    def test_the_message_of_a_loop(self, tmp_path: Path) -> None:
        with pytest.raises(WorkerLoopError) as error, loop_errors(1, tmp_path):
            torch.empty(FULL)
        first, *_, ways = str(error.value).splitlines()
        assert "tried to allocate" in first
        assert first.endswith("(raised on rank 1)")
        assert ways == SAVE_MEMORY


@pytest.mark.process
def test_models_that_cannot_be_built(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    width = 1 << 46
    done = mlx(experiment("faults"), "train", "run", "cfg.start_workers=0", f"models.net.width={width}")
    assert done.returncode == 1
    first, ways = done.stderr.splitlines()[:2]
    assert first.startswith("error: models.net: src.experiment.Net cannot be built: RuntimeError: ")
    assert ways == SAVE_MEMORY
