"""Tokens per second on texts of different lengths: padded, and grouped by length."""

import tempfile
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from commands import environment, found_by, mlx, torchrun, workplace
from page import table
from rounds import alternating, compared, median

TITLE = "Texts of different lengths"

CONTENDERS = {
    "torchrun-longest": "torchrun, padded to the longest text of all",
    "torchrun-batch": "torchrun, padded to the longest of the batch",
    "torchrun-grouped": "the same, `DistributedLengthGroupedSampler` of transformers",
    "mlx-longest": "**mlx**, padded to the longest text of all",
    "mlx-batch": "**mlx**, padded to the longest of the batch",
    "mlx-grouped": "**mlx**, the same, `group_by_length`",
}


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "text")
        found = alternating(_contenders(), only, rounds, lambda contender: _measured(contender, folder))
    rates = {name: [item["tokens_per_s"] for item in measured] for name, measured in found.items()}
    first = rates["torchrun-longest"]
    rows = []
    for name, rate in rates.items():
        speed = f"{median(rate):,.0f} tokens/s" if name == "torchrun-longest" else compared(rate, first)
        rows.append([CONTENDERS[name], speed, f"{100 * median(item['used'] for item in found[name]):.0f} %"])
    texts = found["torchrun-longest"][0]["texts"]
    without = "" if "torchrun-grouped" in found else " Without transformers, which was not installed."
    return f"""Tokens per second of both workers, without padding. A transformer with two layers of width 64 learns
{texts:,} docstrings of Python's standard library, of up to 512 bytes, which are the tokens; 16 texts per worker
and step. Medians of {rounds} alternating rounds, with the minimum and maximum ratio.{without}

{table(["", "speed", "of a batch are tokens"], rows)}
"""


def _contenders() -> list[str]:
    """Leave out the sampler of transformers without that library, which make bench does not install.

    TorchMetrics imports it where it is installed, so that everything else would start later.
    """
    return [name for name in CONTENDERS if name != "torchrun-grouped" or find_spec("transformers")]


def _measured(contender: str, folder: Path) -> dict[str, float]:
    out = folder / "measured.json"
    framework, _, kind = contender.partition("-")
    padding = "longest" if kind == "longest" else "batch"
    chosen = (f"datasets.train.padding={padding}", f"datasets.train.grouped={str(kind == 'grouped').lower()}")
    command = mlx("cfg.engine=local", *chosen, f"cfg.out={out}") if framework == "mlx" else torchrun(2, kind, out)
    return found_by(command, folder, out, environment(folder))
