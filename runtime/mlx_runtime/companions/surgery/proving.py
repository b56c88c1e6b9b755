"""The proof of an experiment: short runs of it that must be equal, killed and resumed or not, with 2 workers or 1."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.surgery.probe import DRIVER, LOCAL, Probe, values
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.config.projects import AN_EXPERIMENT, main_class
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect, in_storage
from mlx_runtime.driver.request import load_config
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, read_rows
from mlx_runtime.workers.fork_server import exit_reason
from mlx_runtime.workers.local import cool_down, take_server, warm_up
from mlx_runtime.workers.placement import engine_for

BATCHES, EVERY = 8, 3
"""Updates per epoch, and between two checkpoints."""

TOLERANCE = 1e-3
"""Relative difference of the first gradients that two numbers of workers may have; ten times as much of all others."""

CLOCKS = re.compile(r"time|date|hostname|node_ip|pid$|.*_per_s$")
"""Metrics that differ between any two runs."""

NOT_DETERMINISTIC = re.compile(r"(\w+) does not have a deterministic implementation")
"""Part of torch's error about an operation."""

BY_DESIGN = {
    "deterministic": (),
    "resume": (
        "times and rates in metrics.jsonl",
        "trackers and callbacks, which are left out here",
        "the interrupted epoch of a loop without a loader, which is repeated",
    ),
    "workers": (
        "dropout, which is off here: each worker draws its own random numbers",
        "BatchNorm, which is in eval mode here: each worker normalizes its own rows",
        "the last two batches of a pass, whose rows are divided among the workers",
    ),
}
"""What differs by design, by check."""

CURES = {
    "datasets.": "the dataset has a state in the worker; compute each row from its number",
    "models.": "the state_dict lacks this attribute; register a buffer",
    "": "no checkpoint contains it; keep it in a tool, or in a class with a state_dict",
}
"""Explanations of values that differ, by the beginning of their names."""


@dataclass(frozen=True)
class Check:
    """The outcome of one comparison."""

    name: str  # a key of `BY_DESIGN`
    holds: bool | None  # None: it cannot be made
    text: str
    causes: tuple[str, ...] = ()  # most likely first


@dataclass(frozen=True)
class Proof:
    """The outcome of all comparisons."""

    experiment: str
    seed: int
    checks: tuple[Check, ...]
    folder: str | None  # of the runs, kept if a check has failed

    @property
    def holds(self) -> bool:
        return all(check.holds is not False for check in self.checks)

    @property
    def badge(self) -> str:
        """Line of Markdown for a README; empty if a check has failed."""
        titles = {"deterministic": "deterministic", "resume": "exact resume", "workers": "2 workers = 1"}
        text = ", ".join(titles[check.name] for check in self.checks if check.holds)
        url = f"https://img.shields.io/badge/mlx-{text}-brightgreen".replace(" ", "_")
        return f"![mlx train prove: {text}]({url})" if self.holds else ""


@dataclass(frozen=True)
class RunJob:
    """A run of a proof, for its process."""

    folder: Path  # of its notes and its storage
    request: Request
    probe: Mapping[str, Any] = field(default_factory=dict)  # arguments of its probe

    @property
    def run(self) -> RunFolder:
        """The run, once it has begun."""
        return RunFolder(next(self.folder.glob("runs/*/run_001")))

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def notes(self) -> list[list[dict[str, Any]]]:
        """Return the notes of each rank, in the order of time."""
        files = [self.folder / f"rank_{rank}.jsonl" for rank in range(len([*self.folder.glob("rank_*.jsonl")]))]
        return [[json.loads(line) for line in file.read_text().splitlines() if line[-2:] == "}}"] for file in files]

    def rows(self) -> list[dict[str, Any]]:
        """Return what the run has recorded, without times."""
        rows = (row for _, row in read_rows(self.run.metrics.read_bytes()) if row is not None)
        return [{key: value for key, value in row.items() if not CLOCKS.match(key)} for row in rows]

    def state(self) -> dict[str, str]:
        """Return the digests of the values in the last checkpoint, without paths and times."""
        store = CheckpointStore(self.run.checkpoints)
        state = {key: item for key, item in store.load(store.all()[-1]).items() if key not in ("config", "tracking")}
        return dict(values(state, "", set(), depth=-100))  # without a limit


def work(job: RunJob) -> int:
    """Train one run in this process, which the fork server has just started, in the folder of the experiment."""
    os.environ[DRIVER] = str(os.getpid())
    warm_up()  # before anything starts threads
    with clean_exit():
        try:
            experiment = main_class(AN_EXPERIMENT, Path.cwd())
            config = load_config(experiment, job.request)
            if config.run is None:
                probe = {"_target_": path_of(Probe), "folder": str(job.folder), **job.probe}
                config = in_storage(config, str(job.folder / "runs"), callbacks={"probe": probe})
            with connect(config.cfg) as cluster:
                fit(experiment, config, cluster)
        finally:
            cool_down()
    return 0


class Prover:
    """Proves the experiment in the working directory, whose fork server has been started.

    Args:
        experiment: its class.
        request: overrides and variants of all runs.
        seed: seed of the kills.
        kills: number of kills.
        say: called with lines about the progress.
    """

    def __init__(
        self, experiment: type, request: Request, *, seed: int, kills: int, say: Callable[[str], object]
    ) -> None:
        self._config, self._request, self._seed = load_config(experiment, request), request, seed
        self._kills, self._say, self._numbers = kills, say, itertools.count()
        cfg = self._config.cfg
        if stream_names(self._config.tree) or engine_for(cfg)[0] not in ("local", "in_process"):
            raise ConfigError("prove trains on this machine without Ray: leave out cfg.engine, and streams of Ray Data")
        limits = {
            **{"debug.limit_batches": BATCHES * cfg.accumulate_grad_batches, "num_epochs": 2, "hub.mirror": "null"},
            **{"log_every_steps": 1, "checkpoint_every_steps": EVERY, "keep_checkpoints": 99},
            "max_steps": "null" if cfg.max_steps is None else 2 * BATCHES,
            "evaluate_every_steps": "null" if cfg.evaluate_every_steps is None else 5,
        }
        self._short = tuple(f"++cfg.{name}={value}" for name, value in limits.items())

    def prove(self) -> Proof:
        """Train and compare all runs. Their folder is removed if everything holds."""
        self._folder, self._server = Path(tempfile.mkdtemp(prefix="mlx-proof-")), take_server()
        self._server.preload(__name__, "mlx_runtime.workers.worker")
        try:
            whole = self._whole("whole")
            checks = [self._deterministic(whole)]
            if checks[0].holds:
                checks += [self._resume(whole), self._workers()]
        except KeyboardInterrupt:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            self._server.close()
        if not (kept := any(check.holds is False for check in checks)):
            shutil.rmtree(self._folder)
        return Proof(self._config.cfg.name, self._seed, tuple(checks), str(self._folder) if kept else None)

    def _job(self, name: str, *overrides: str, **probe: Any) -> RunJob:
        (folder := self._folder / name).mkdir()
        words = (*self._short, *self._request.overrides, *overrides)
        return RunJob(folder, replace(self._request, overrides=words), probe)

    def _train(self, job: RunJob) -> int:
        """Train a run until its process ends, and return its exit code."""
        with (job.folder / "log.txt").open("a") as log:
            self._server.start(next(self._numbers), partial(work, job), {**os.environ, "MLX_DEBUG": ""}, [log, log])
        while not (ended := list(self._server.exits(1.0))):
            pass
        return int(ended[0][1])

    def _whole(self, name: str, *overrides: str, **probe: Any) -> RunJob:
        """Return an uninterrupted run that has succeeded."""
        self._say(f"training  {name}")
        job = self._job(name, *overrides, **probe)
        if code := self._train(job):
            raise MlxError(f"the run {name!r} failed, so nothing is proven: {_why(job, code)}; see {job.folder}")
        if not job.notes():
            raise MlxError(f"no optimizer has made an update in worker_loop, so nothing is proven; see {job.folder}")
        return job

    def _deterministic(self, whole: RunJob) -> Check:
        found = difference(whole, self._whole("second"))
        if found is None:
            return Check("deterministic", True, "two uninterrupted runs are equal, bit for bit")
        watched = self._job("deterministic", "++cfg.deterministic=true")
        self._train(watched)
        named = {f"torch.use_deterministic_algorithms names {item}" for item in NOT_DETERMINISTIC.findall(watched.log)}
        unknown = "something depends on time, on threads or on the order of a set; torch names no operation"
        causes = (*sorted(named),) or found[1] or (unknown,)
        return Check("deterministic", False, f"two uninterrupted runs differ: {found[0]}", causes)

    def _resume(self, whole: RunJob) -> Check:
        choice, notes = random.Random(self._seed), whole.notes()
        updates = sorted({note["step"] for note in notes[0]})
        first, often = EVERY, []
        if not notes[0][0]["rows"]:  # a loop without a loader repeats an interrupted epoch, which is then not the same
            first, often = len(updates) // 2, ["++cfg.checkpoint_every_steps=null"]
        if not (late := updates[first:]):
            return Check("resume", None, "no update follows the first checkpoint")
        steps = sorted(choice.sample(late, min(self._kills, len(late))))
        kills = [[step, choice.randrange(len(notes)), ("worker", "driver")[n % 2]] for n, step in enumerate(steps)]
        told = ", ".join(f"step {step} ({victim} of rank {rank})" for step, rank, victim in kills)
        told = f"killed in {told} by --seed {self._seed}"
        self._say(f"training  {told}")
        job = self._job("killed", "++cfg.elastic.max_failures=-1", *often, kills=kills)
        code = self._train(job)
        for _ in kills:
            if code == -signal.SIGKILL:
                code = self._train(replace(job, request=Request(resume=str(job.run.path))))
        if code:
            return Check("resume", False, f"{told}: it could not be resumed: {_why(job, code)}")
        assert len([*job.folder.glob("killed_*")]) == len(kills), "each of them has been killed"
        if (found := difference(whole, job)) is None:
            return Check("resume", True, f"{told}, and resumed: the same bits")
        causes = found[1] or ("a value that is neither in a checkpoint nor in an attribute",)
        return Check("resume", False, f"{told}, and resumed: the first difference is {found[0]}", causes)

    def _workers(self) -> Check:
        cfg, datasets = self._config.cfg, self._config.tree.get("datasets", {})
        if cfg.strategy == "pipeline" or cfg.replicas.every is not None:
            return Check("workers", None, "updates of pipelines and averaged replicas depend on the number of workers")
        batches = f"debug.limit_batches={BATCHES // 2 * cfg.accumulate_grad_batches}"
        fixed = ("num_epochs=1", "checkpoint_every_steps=null", "elastic.min_workers=null", "elastic.max_workers=null")
        short = [f"++cfg.{item}" for item in (batches, *fixed)]
        sizes = {name: node.get("batch_size") for name, node in datasets.items() if isinstance(node, dict)}
        doubled = [f"datasets.{name}.batch_size={2 * size}" for name, size in sizes.items() if isinstance(size, int)]
        two = self._whole("two workers", *short, "++cfg.start_workers=2", plain=True)
        one = self._whole("one worker", *short, *doubled, "++cfg.start_workers=1", plain=True)
        first, last = (one.notes()[0][number] for number in (0, min(1, len(one.notes()[0]) - 1)))
        rows = [sum(notes[0]["rows"] for notes in job.notes()) for job in (one, two)]
        if rows[0] != rows[1] or not rows[0]:
            text = f"an update reads {rows[0]} rows with one worker, and {rows[1]} with two"
            return Check("workers", None, f"{text}; a batch_size in datasets would make them equal")
        found = unequal(one, two)
        if found is None:
            return Check("workers", True, "2 workers have the gradients and metrics of 1, within rounding")
        drawn = [key for key in unlike(first["state"], last["state"]) if key.startswith("random")]
        if drawn:
            return Check("workers", None, f"the loop draws random numbers ({drawn[0]}), and each worker draws its own")
        return Check("workers", False, f"2 workers differ from 1: {found[0]}", found[1])


Found = tuple[str, tuple[str, ...]]
"""What differs first, and likely causes."""


def _why(job: RunJob, code: int) -> str:
    """Return the error of a run that has failed."""
    lines = [line.removeprefix("error: ") for line in job.log.splitlines() if line.startswith("error: ")]
    return lines[-1] if lines else f"it {exit_reason(code)}"


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ; NaN equals NaN."""
    return [key for key in {**one, **other} if repr(one.get(key)) != repr(other.get(key))]


def difference(whole: RunJob, other: RunJob) -> Found | None:
    """Return the first difference between an uninterrupted run and another one; None if they are equal, bit for bit."""
    found = [(math.inf, f"{key} in the last checkpoint") for key in unlike(whole.state(), other.state())[:1]]
    nothing: dict[str, Any] = {}
    for a, b in itertools.zip_longest(whole.rows(), other.rows(), fillvalue=nothing):
        found += [((a or b)["step"], f"metric {key} in step {(a or b)['step']}") for key in unlike(a, b)]
    if not found:
        return None
    before, after = whole.notes()[0][-1], other.notes()[0][-1]
    for rank, (notes, others) in enumerate(zip(whole.notes(), other.notes(), strict=False)):
        known = {(note["step"], note["number"]): note for note in notes}
        for note in others:
            same = known.get((note["step"], note["number"]), before)
            differs = unlike(same["state"], note["state"])
            if differs and note["step"] <= min(found)[0]:
                found.append((note["step"] - 0.5, f"{differs[0]} in step {note['step']}, rank {rank}"))
                start = next(item for item in others if item["process"] == note["process"])  # after it was resumed
                before, after = known.get((start["step"], start["number"]), same), start
    return min(found)[1], tuple(_causes(before["hidden"], after["hidden"]))


def _causes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield the values outside of checkpoints that differ between the notes of two runs: generators, then counters."""
    found = sorted(set(unlike(before, after)) & {*before} & {*after}, key=lambda key: (not after[key].isdecimal(), key))
    found = [key for key in found if not key.startswith(LOCAL)] or found
    for key in sorted(found, key=lambda key: not after[key].startswith("generator"))[:3]:
        if after[key].startswith("generator"):
            yield f"{key} is a random generator whose state no checkpoint contains: draw from torch's, or save it"
        else:
            cure = next(cure for prefix, cure in CURES.items() if key.startswith(prefix))
            yield f"{key} is {before[key]} in the uninterrupted run, and {after[key]} in the other: {cure}"


def unequal(one: RunJob, two: RunJob) -> Found | None:
    """Return the first gradient or metric of two workers that is not that of one, within the tolerance."""
    for number, file in enumerate(sorted(one.folder.glob("gradients_*.pt")), start=1):
        ours, theirs = (torch.load(job.folder / file.name, weights_only=True) for job in (one, two))
        tolerance = TOLERANCE if number == 1 else 10 * TOLERANCE
        total = torch.stack([item.norm() for item in ours.values()]).norm()
        for key, gradient in ours.items():
            other = theirs.get(key, torch.zeros_like(gradient))
            if (other - gradient).norm() > tolerance * (gradient.norm() + tolerance * total):
                ratio = float((gradient * other).sum() / gradient.square().sum())
                cause = "workers use other rows, or weigh them otherwise: is the model prepared with prepare_model?"
                if (other - ratio * gradient).norm() < 0.01 * other.norm():
                    cause = f"it is {ratio:.2g} times as large: return the mean of the loss over the rows, not the sum"
                return f"gradient of {key} in update {number}", (cause,)
    for a, b in zip(one.rows(), two.rows(), strict=False):
        for key in unlike(a, b):
            ours, theirs = (math.nan if row.get(key) is None else row[key] for row in (a, b))
            if not math.isclose(ours, theirs, rel_tol=10 * TOLERANCE, abs_tol=1e-6):
                text = f"metric {key} in step {a['step']} is {theirs:.6g}, and {ours:.6g} with one"
                return text, ("it depends on which worker reads a row: use an object in metrics, which merges them",)
    return None
