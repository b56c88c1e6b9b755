"""Loss after equally many updates against the bytes that replicas exchange, on the digits of the template."""

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from commands import BIN, ROOT, RunError, environment, mlx
from page import table
from rounds import alternating, median

from mlx_runtime import open_run

TITLE = "Replicas"

EPOCHS = 20
"""Of 20 updates each."""

DILOCO = ("cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9")
"""The outer optimizer of the paper."""

CONTENDERS: dict[str, tuple[str, ...]] = {
    "DDP": (),
    "DDP, `fp16`": ("cfg.replicas.traffic=fp16",),
    "DDP, `powersgd`": ("cfg.replicas.traffic=powersgd",),
    "`every=1`": ("cfg.replicas.every=1",),
    "`every=10`": ("cfg.replicas.every=10",),
    "`every=10`, `fp16`": ("cfg.replicas.every=10", "cfg.replicas.traffic=fp16"),
    "`every=10`, `lr=0.7`, `momentum=0.9`": ("cfg.replicas.every=10", *DILOCO),
    "the same, `fp16`": ("cfg.replicas.every=10", *DILOCO, "cfg.replicas.traffic=fp16"),
    "`every=100`": ("cfg.replicas.every=100",),
    "`every=100`, `lr=0.7`, `momentum=0.9`": ("cfg.replicas.every=100", *DILOCO),
}


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = Path(shutil.copytree(ROOT / "<<cookiecutter.experiment_name>>", Path(parent) / "digits"))
        subprocess.run([BIN / "mlx", "train", "bind"], cwd=folder, env=environment(folder), check=True)
        seeds = dict.fromkeys(CONTENDERS, 0)

        def measured(contender: str) -> dict[str, float]:
            seeds[contender] += 1
            return _measured(contender, folder, seeds[contender])

        found = alternating(list(CONTENDERS), only, rounds, measured)
    rows = []
    for name, items in found.items():
        losses = [item["loss"] for item in items]
        loss = f"{median(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})"
        accuracy = f"{100 * median(item['accuracy'] for item in items):.1f} %"
        rows.append([name, f"{median(item['bytes'] for item in items) / 1e6:,.2f} MB", loss, accuracy])
    return f"""The digits of the template, {EPOCHS * 20} updates on two workers of 32 rows each, with Adam. Bytes are
those that one worker contributes to averages; those of DDP are computed from the shapes of the parameters. Losses and
accuracies are those of the validation set at the end. Medians of {rounds} seeds, with the minimum and maximum loss.

{table(["", "sent", "loss", "accuracy"], rows)}
"""


def _measured(contender: str, folder: Path, seed: int) -> dict[str, float]:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    fixed = ("cfg.name=digits", f"cfg.num_epochs={EPOCHS}", "tools.early_stopping.patience=1000", "cfg.trackers={}")
    command = list(map(str, mlx(*fixed, "cfg.engine=local", f"cfg.seed={seed}", *CONTENDERS[contender])))
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        raise RunError(command, done.stdout + done.stderr)
    run = folder / "runs" / "digits" / "run_001"
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    last = {name: value for line in lines for name, value in line.items()}
    sent = sum(line.get("replicas/bytes", 0.0) for line in lines)
    shapes = [item.shape for name, item in open_run(run).state()["models"]["net"].items() if "running" not in name]
    if not sent:
        sent = sum(_bytes_of_ddp(contender, update, shapes) for update in range(EPOCHS * 20))
    return {"bytes": sent, "loss": last["val/cross_entropy"], "accuracy": last["val/accuracy"]}


def _bytes_of_ddp(contender: str, update: int, shapes: list[Any]) -> float:
    """Return the bytes of the gradients of an update, as torch's hooks compress them."""

    def values() -> Iterator[int]:
        for shape in shapes:
            size, first = math.prod(shape), shape[0] if shape else 1
            factors = 4 * (first + size // first)
            compresses = "powersgd" in contender and update >= 10 and len(shape) > 1 and 2 * factors < size
            yield factors if compresses else size

    return sum(values()) * (2 if "fp16" in contender else 4)
