"""Utilization of devices: busy time of GPUs, and counts of floating-point operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mlx_runtime.errors import MlxError
from mlx_runtime.training.loop.utilization import busy, flops_per_row, operations, peak_tflops

pytestmark = pytest.mark.pure


def test_utilization_is_recorded_only_if_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 100 * device.index - 3)
    assert busy(gpu) == {"gpu/utilization_pct": 97.0}

    def fail(device: torch.device) -> None:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert busy(gpu) == {}


def settings(precision: Any = "bf16", matmul_precision: str = "high") -> Any:
    return SimpleNamespace(precision=precision, matmul_precision=matmul_precision)


@pytest.mark.parametrize(
    ("name", "cfg", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", settings(), 989),
        ("NVIDIA H100 PCIe", settings("fp16"), 756),
        ("NVIDIA A100-SXM4-80GB", settings(32), 156),
        ("NVIDIA A100-SXM4-80GB", settings(32, "highest"), None),
        ("Tesla V100-SXM2-16GB", settings("fp16"), 125),
        ("Tesla T4", settings(32), None),
        ("NVIDIA L40", settings(), None),
    ],
)
def test_the_peak_of_a_gpu_in_the_precision_of_the_run(name: str, cfg: Any, peak: float | None) -> None:
    assert peak_tflops(name, cfg) == peak


def test_operations_and_their_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert operations(494.5e12, torch.device("cuda", 0), settings()) == {"tflops": 494.5, "gpu/mfu_pct": 50.0}
    assert operations(1e9, torch.device("cpu"), settings()) == {"tflops": 0.001}


def test_models_say_what_a_row_takes() -> None:
    net, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert flops_per_row([net, other]) == 0
    net.flops_per_row, other.flops_per_row = 5, 2.5
    assert flops_per_row([net, other]) == 7.5
    net.flops_per_row = -1
    with pytest.raises(MlxError, match="flops_per_row of a model is -1; set it to a number"):
        flops_per_row([net])
