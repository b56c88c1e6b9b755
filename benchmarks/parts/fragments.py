"""Losses and traffic of pipelines and of two clusters of unequal machines, compared with one process."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import BIN, ROOT, RunError, environment, mlx
from networks import Network, network, train
from page import table
from rounds import alternating

TITLE = "Fragments"

LINKS = (100, 20, 50, 50, 100, 20)
"""Mbit/s of the links of six machines. Each three of them form a cluster."""

CLUSTERS = ("cfg.strategy=pipeline", "cfg.fragments.stages=3")

CONTENDERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (0, ("cfg.strategy=ddp",)),
    "one pipeline of two stages": (2, ("cfg.strategy=pipeline",)),
    "the same, `cfg.fragments.traffic=bf16`": (2, ("cfg.strategy=pipeline", "cfg.fragments.traffic=bf16")),
    "the same, `cfg.fragments.traffic=fp16`": (2, ("cfg.strategy=pipeline", "cfg.fragments.traffic=fp16")),
    "two clusters of three stages": (6, CLUSTERS),
    "the same, `cfg.replicas.every=1`": (6, (*CLUSTERS, "cfg.replicas.every=1")),
    "the same, `cfg.replicas.every=10`": (6, (*CLUSTERS, "cfg.replicas.every=10")),
}
"""Numbers of workers, and overrides."""

BATCH = 64

FIXED = ("tools.early_stopping.patience=1000",)

EXPERIMENTS: dict[str, tuple[tuple[str, ...], int, tuple[str, str]]] = {
    "digits": (("cfg.num_epochs=5", *FIXED), 100, ("val/cross_entropy", "val/accuracy")),
    "sorter": (("cfg.num_epochs=4", "datasets.train.rows=3840"), 240, ("val/loss", "val/sorted")),
}
"""Overrides, numbers of updates, and metrics."""


def section(rounds: int, only: Collection[str]) -> str:
    """Ignores `rounds`: nothing is timed."""
    if os.geteuid():
        print(f"{TITLE}: not measured, because network namespaces need root")
        return ""
    with tempfile.TemporaryDirectory(prefix="bench-") as parent, network(len(LINKS)) as machines:
        for number, speed in enumerate(LINKS):
            machines.limit(number, speed)
        columns = {}
        for experiment in EXPERIMENTS:
            folder = prepare_experiment(Path(parent), experiment)
            of = lambda name, folder=folder: _measured(name, folder, machines)
            columns[experiment] = alternating(list(CONTENDERS), only, 1, of)
    rows = [[name, *(cell for found in columns.values() for cell in found[name][0])] for name in columns["digits"]]
    head = [f"{name}: {title}" for name in EXPERIMENTS for title in ("MB sent", "loss", "correct")]
    digits, sorter = (updates for _, updates, _ in EXPERIMENTS.values())
    return f"""The digits of the template after {digits} updates with {BATCH} rows, and
[sorter.py](examples/sorter.py) after {sorter}: losses and shares of correct answers of the validation set. Models are
cut into stages with about as many parameters. Clusters consist of machines whose links have
{", ".join(map(str, LINKS[:3]))} and {", ".join(map(str, LINKS[3:]))} Mbit/s, in network namespaces. What the machine
that sends most has sent per update is counted at its link, from the first step to the end of the run, and includes
evaluations after each epoch. One seed each: sums in another order are rounded differently, and Adam lets such
differences grow, most of all in the sorter, whose loss still falls steeply after these updates.

{table(["", *head], rows)}
"""


def prepare_experiment(parent: Path, name: str) -> Path:
    """Create and bind an experiment."""
    folder = Path(shutil.copytree(ROOT / "<<cookiecutter.experiment_name>>", parent / name))
    if name == "sorter":
        shutil.copy(ROOT / "docs" / "examples" / "sorter.py", folder / "src" / "experiment.py")
    subprocess.run([BIN / "mlx", "train", "bind"], cwd=folder, env=environment(folder), check=True)
    return folder


def _measured(contender: str, folder: Path, machines: Network) -> list[str]:
    """Return the cells of a contender: what is sent, the loss and the share of correct answers."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    own, updates, metrics = EXPERIMENTS[folder.name]
    workers, overrides = CONTENDERS[contender]
    batch = BATCH // (2 if workers == len(LINKS) else 1)
    options = [
        *("cfg.name=compared", "cfg.trackers={}", f"cfg.storage_path={folder}/runs", "cfg.seed=0"),
        *(f"datasets.train.batch_size={batch}", *own, *overrides),
    ]
    sent: list[list[int]] = []

    def look(printed: str) -> None:
        if not sent and "\ntrain  " in printed:  # all workers have their parts of the models
            sent.append(machines.sent())

    if workers:
        train(machines, workers, folder, options, look)
    else:
        command = list(map(str, mlx("cfg.start_workers=0", *options)))
        done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
        if done.returncode:
            raise RunError(command, done.stdout + done.stderr)
    sent.append(machines.sent())
    lines = map(json.loads, (folder / "runs" / "compared" / "run_001" / "metrics.jsonl").read_text().splitlines())
    last = {name: value for line in lines for name, value in line.items()}
    most = max(after - before for before, after in zip(sent[0], sent[-1], strict=True)) / updates
    loss, correct = (last[name] for name in metrics)
    return [f"{most / 1e6:.3f}" if workers else "", f"{loss:.4f}", f"{100 * correct:.1f} %"]
