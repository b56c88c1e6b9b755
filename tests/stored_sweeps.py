"""Sweeps on disk, as left by their drivers, without training."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.runs.folder import RunFolder, claim_run, run_folder
from mlx_runtime.runs.records import Record

Curves = Mapping[str, Sequence[float | None]]
"""Values of metrics by epoch; None for an epoch that did not record one."""

DEFINITION = {
    "overrides": ["cfg.num_epochs=3", "optimizers.adam.lr=0.1,0.01,0.001", "models.net.width=8,16"],
    "search": "grid",
    "scheduler": "none",
    "metric": "val/loss",
    "mode": "min",
    "trials": 6,
    "folds": None,
    "seed": 0,
}

LR, WIDTH = "optimizers.adam.lr", "models.net.width"


def store_run(root: str, curves: Curves, status: str = "SUCCEEDED", **fields: Any) -> str:
    """Store a run of a sweep with its metrics by epoch, and return its name."""
    folder = claim_run(root, "digits")
    times = {"start": "2026-01-01T10:00:00+00:00", "end": "2026-01-01T10:00:30+00:00"}
    Record(folder, **(times | {"status": status, "monitor": "val/loss", "mode": "min"} | fields))
    epochs = max((len(values) for values in curves.values()), default=0)
    lines = [{"step": 10 * epoch, "epoch": epoch, "lr/adam": 0.1, "train/loss": 9.0} for epoch in range(epochs)]
    for epoch in range(epochs):
        values = {name: known[epoch] for name, known in curves.items() if epoch < len(known)}
        lines.append({"step": 10 * epoch + 9, "epoch": epoch} | {n: v for n, v in values.items() if v is not None})
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.conf.write_text("cfg:\n  seed: 0\n  cross_validation: {folds: 2, fold: 0}\n")
    folder.push(folder.metrics, folder.conf, must=True)
    return folder.name


def store_sweep(root: str, entries: Sequence[Mapping[str, Any]], **definition: Any) -> RunFolder:
    """Store the record of `sweep_001` with trials like `{"values": {"a": "1"}, "runs": ["run_001"]}`."""
    folder = run_folder(root, "digits", "sweep_001")
    folder.path.mkdir(parents=True)
    numbered = [{"trial": number} | dict(trial) for number, trial in enumerate(entries, 1)]
    Record(folder, status="SUCCEEDED", definition=DEFINITION | definition, trials=numbered, attempt=1)
    return folder


def store_search(root: Path, trials: int = 24, folds: int | None = None) -> RunFolder:
    """Store a search over a logarithmic interval, an integer one and names, with pruned and failed trials."""
    found = []
    for number in range(1, trials + 1):
        lr = 10 ** (-4 + 3 * ((number * 0.618034) % 1))
        width, name = 8 + (number * 37) % 57, ("relu", "gelu", "tanh")[number % 3]
        values = {LR: f"{lr:.4g}", WIDTH: str(width), "models.net.activation": name}
        floor = 0.2 + 0.25 * (math.log10(lr) + 2.4) ** 2 + 0.002 * abs(width - 40) + 0.03 * (name == "tanh")
        status = "FAILED" if number == 7 else "PRUNED" if floor > 0.6 else "SUCCEEDED"
        runs = []
        for fold in range(folds or 1):
            noise = 0.03 * math.sin(7 * number + 3 * fold)
            epochs = {"FAILED": 2, "PRUNED": 3}.get(status, 9)
            losses = [floor + noise + math.exp(-0.6 * epoch) + 0.004 * max(0, epoch - 6) for epoch in range(epochs)]
            curves = {"val/loss": losses, "val/accuracy": [1 - loss / 3 for loss in losses]}
            error = "ValueError: the loss is not finite\n  src/experiment.py:30 in worker_loop" if number == 7 else None
            runs.append(store_run(str(root), curves, status, error=error))
        found.append({"values": values, "runs": runs})
    overrides = [f"{LR}=tag(log, interval(1e-4, 0.1))", f"{WIDTH}=int(interval(8, 64))", "cfg.num_epochs=9"]
    overrides.append("models.net.activation=relu,gelu,tanh")
    return store_sweep(
        str(root), found, overrides=overrides, search="optuna", scheduler="asha", trials=trials, folds=folds
    )
