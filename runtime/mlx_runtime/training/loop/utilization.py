"""Utilization of the devices of a run: busy time of a GPU, and operations of the models per second."""

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import torch

from mlx_runtime.distributed.wrapping import unwrap
from mlx_runtime.errors import MlxError

PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "V100": 125,
    "T4": 65,
}
"""Peak TFLOPS of dense half-precision matrix products, from NVIDIA's data sheets, by words in the name of a GPU."""

WITHOUT_TF32 = ("V100", "T4")


def busy(device: torch.device) -> dict[str, float]:
    """Return the percentage of time in which a GPU was busy, as a number to record; {} if NVML does not report it."""
    with contextlib.suppress(Exception):  # nvidia-ml-py is optional, and has its own errors
        return {"gpu/utilization_pct": float(torch.cuda.utilization(device))}
    return {}


def flops_per_row(models: Iterable[Any]) -> float:
    """Return the operations of a training step per row: the sum of the attribute `flops_per_row` of models.

    Raises:
        MlxError: the attribute of a model is not a number above 0.
    """
    counts = [item.flops_per_row for item in map(unwrap, models) if hasattr(item, "flops_per_row")]
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | float) or not count > 0:
            raise MlxError(
                f"flops_per_row of a model is {count!r}; set it to a number of operations, like 6 * parameters * tokens"
            )
    return float(sum(counts))


def operations(flops_per_s: float, device: torch.device, cfg: Any) -> dict[str, float]:
    """Return the operations per second of one device, as numbers to record, and their share of the peak of a GPU.

    The share (model FLOPs utilization) is recorded for the GPUs of `PEAK_TFLOPS`, in half precision or TF32.
    """
    tflops = flops_per_s / 1e12
    peak = peak_tflops(torch.cuda.get_device_name(device), cfg) if device.type == "cuda" else None
    return {"tflops": tflops} | ({} if peak is None else {"gpu/mfu_pct": 100 * tflops / peak})


def peak_tflops(name: str, cfg: Any) -> float | None:
    """Return the peak of a GPU in the precision of a run, or None if it is unknown."""
    words = {*re.split(r"[ -]", name)}
    known = next((title for title in PEAK_TFLOPS if words >= {*title.split()}), None)
    if known is None or (cfg.precision == 32 and (cfg.matmul_precision == "highest" or known in WITHOUT_TF32)):
        return None
    return PEAK_TFLOPS[known] / (2 if cfg.precision == 32 else 1)
