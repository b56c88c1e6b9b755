"""A sweep without training: an engine that writes the files of runs, and sends their reports."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_runtime.companions.sweeps.definition import Definition, SweepPlan
from mlx_runtime.companions.sweeps.space import parse
from mlx_runtime.companions.sweeps.trial import TrialJob
from mlx_runtime.events import EpochEnded
from mlx_runtime.runs.folder import named_run
from mlx_runtime.storage.leases import lease

Score = Callable[[TrialJob, int], float]
"""Value of `val/loss` of a run after an epoch."""


def plan_of(root: Path, *overrides: str, epochs: int = 3, **fields: Any) -> SweepPlan:
    """A plan as `definition.plan` makes it, of an experiment without a conf.yaml."""
    space = parse(overrides)
    defaults = {"search": "grid", "scheduler": "none", "metric": "val/loss", "mode": "min", "trials": space.size or 0}
    definition = Definition(overrides=overrides, **{**defaults, **fields})
    cfg = SimpleNamespace(name="digits", storage_path=str(root), num_epochs=epochs)
    return SweepPlan(definition, space, SimpleNamespace(cfg=cfg))


class FakeEngine:
    """Advances up to `parallel` runs by one epoch in turn.

    A run whose score raises a ValueError fails. `seen` are all runs that it started.
    """

    def __init__(self, score: Score, *, parallel: int = 1, epochs: int = 3, metric: str = "val/loss") -> None:
        self.score, self.parallel, self.epochs, self.metric = score, parallel, epochs, metric
        self.seen: list[TrialJob] = []

    def run(self, sweep: Any) -> None:
        running: list[TrialJob] = []
        while True:
            while len(running) < self.parallel and not sweep.stopping and (job := sweep.next()) is not None:
                self.seen.append(job)
                self.begin(job)
                running.append(job)
            if not running:
                return
            for job in list(running):
                status, error = self._advance(sweep, job)
                if sweep.stopping and not status:
                    status = "STOPPED"
                if status:
                    self.record(job, status=status, error=error)
                    running.remove(job)
                    sweep.ended(job, status, error or "")

    def _advance(self, sweep: Any, job: TrialJob) -> tuple[str, str | None]:
        """Train an epoch. Returns how the run ended, or nothing."""
        epoch = len(metrics(job))
        if epoch == self.epochs:
            return "SUCCEEDED", None
        try:
            value = self.score(job, epoch)
        except ValueError as error:
            return "FAILED", str(error)
        with (folder(job) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": epoch, "epoch": epoch, self.metric: value}) + "\n")
        if sweep.handle(job, EpochEnded(epoch, self.epochs, {self.metric: value}, 0.1)):
            return "PRUNED", None
        return ("SUCCEEDED" if epoch + 1 == self.epochs else ""), None

    def begin(self, job: TrialJob) -> None:
        self.record(job, **lease())
        (folder(job) / "conf.yaml").write_text("cfg: {}\n")

    def record(self, job: TrialJob, **fields: Any) -> None:
        file = folder(job) / "run.json"
        known = json.loads(file.read_text()) if file.exists() else {"sweep": job.facts}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(known | fields))
        part.replace(file)


def folder(job: TrialJob) -> Path:
    return named_run(job.run, "", "").path


def metrics(job: TrialJob) -> list[dict[str, Any]]:
    file = folder(job) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
