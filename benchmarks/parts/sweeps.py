"""The cost of running trials as a sweep, instead of one by one."""

import math
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import BIN, Command, environment, workplace
from page import table
from processes import Cost, cost
from rounds import alternating, compared, median

TITLE = "Sweeps"

RATES = ("1e-4", "2e-4", "5e-4", "1e-3", "2e-3", "5e-3", "1e-2", "2e-2")
EPOCHS = "5"
SHORT = ("cfg.start_workers=0", f"cfg.num_epochs={EPOCHS}")
"""Overrides of every trial of mlx."""

CONTENDERS = {
    "hand": "**mlx** `train run`, two at a time",
    "mlx-sweep": "**mlx** `train sweep`, two at a time",
    "plain": "a plain script, two at a time",
    "optuna": "Optuna, a plain script per trial, two at a time",
    "tune": "Ray Tune on embedded Ray, two at a time",
    "hydra": "Hydra's multirun, one process, one trial after another",
}


def command(contender: str) -> Command:
    """Return a command that trains all trials."""
    rates, train, python = ",".join(RATES), [BIN / "mlx", "train"], [sys.executable, "tuning.py"]
    metric = ["--metric", "train/accuracy", "--mode", "max"]
    return {
        "hand": _by_hand(*train, "run", *SHORT, "optimizers.adam.lr=RATE"),
        "mlx-sweep": [*train, "sweep", *SHORT, f"optimizers.adam.lr={rates}", *metric, "--parallel", "2"],
        "plain": _by_hand(*python, "trial", "RATE"),
        "optuna": [*python, "optuna", rates],
        "tune": [*python, "tune", rates],
        "hydra": [*python, "-m", f"rate={rates}"],
    }[contender]


def _by_hand(*words: str | Path) -> Command:
    """Return a command that runs another one for each rate, two at a time."""
    return ["sh", "-c", f"printf '%s\\n' {' '.join(RATES)} | xargs -P 2 -I RATE {' '.join(map(str, words))}"]


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")
        variables = environment(folder) | {"EPOCHS": EPOCHS}

        def measure(contender: str) -> Cost:
            return cost(command(contender), folder, variables)

        found = alternating(list(CONTENDERS), only, rounds, measure)
    costs = {
        name: [[getattr(item, field) for item in items] for field in ("wall_s", "cpu_s")]
        for name, items in found.items()
    }
    base, *others = costs
    rows = [[CONTENDERS[base], *(f"{median(values):.1f} s" for values in costs[base])]]
    for name in others:
        goals = (1.15 if name == "mlx-sweep" else math.inf, math.inf)
        ratios = zip(costs[name], costs[base], goals, strict=True)
        rows.append([CONTENDERS[name], *(compared(own, by_hand, at_most=goal) for own, by_hand, goal in ratios)])
    return f"""{len(RATES)} learning rates for the experiment of the first section: {EPOCHS} epochs each, in one process
per trial, with one thread. mlx writes a record, metrics and checkpoints for each trial. Medians of {rounds} alternating
rounds, with the minimum and maximum ratio.

{table(["", "all trials", "CPU seconds of all processes"], rows)}

Goal: `mlx train sweep` <= 1.15x the same runs by hand.
"""
