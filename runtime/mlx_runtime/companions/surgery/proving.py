"""The proof of an experiment: short runs of it that must be equal, killed and resumed or not, with 2 workers or 1."""

import contextlib
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

from mlx_runtime.companions.surgery.probe import DRIVER, Probe, values
from mlx_runtime.companions.surgery.transferring import pin
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
from mlx_runtime.workers.fork_server import ForkServer, exit_reason
from mlx_runtime.workers.local import cool_down, take_server, warm_up
from mlx_runtime.workers.placement import engine_for
from mlx_runtime.workers.stop_requests import StopRequests, sigterm_stops

BATCHES, EVERY = 8, 3
"""Updates per epoch, and between two checkpoints."""

TOLERANCE, ROUNDING = 1e-2, 1e-6
"""Relative differences that two numbers of workers may have: the first of metrics, and of weights by the whole change
of their model, because Adam enlarges rounding errors; the second of weights that hardly change."""

CLOCKS = re.compile(r"timestamp|date|time_this_iter_s|time_total_s|hostname|node_ip|pid|time/.*|gpu/memory|[^/]+_per_s")
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

BADGE = (
    "![mlx train prove: deterministic, exact resume, 2 workers = 1]"
    "(https://img.shields.io/badge/mlx-deterministic,_exact_resume,_2_workers_=_1-brightgreen)"
)
"""Line of Markdown for the README of an experiment for which all checks hold."""

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
    def holds(self) -> bool | None:
        """None if no check has failed, but one was skipped."""
        outcomes = [check.holds for check in self.checks]
        return False if False in outcomes else all(outcomes) or None


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
        return [{key: value for key, value in row.items() if not CLOCKS.fullmatch(key)} for row in rows]

    def state(self) -> dict[str, str]:
        """Return the digests of the values in the last checkpoint, without paths and times."""
        store = CheckpointStore(self.run.checkpoints)
        state = {key: item for key, item in store.load(store.all()[-1]).items() if key not in ("config", "tracking")}
        return dict(values(state))


def work(job: RunJob) -> int:
    """Train one run in this process, which the fork server has just started, in the folder of the experiment."""
    os.environ[DRIVER], tempfile.tempdir = str(os.getpid()), os.environ["TMPDIR"]
    warm_up()  # before anything starts threads
    with clean_exit():
        try:
            experiment = main_class(AN_EXPERIMENT, Path.cwd())
            config = load_config(experiment, job.request)
            if config.run is None:
                probe = {"_target_": path_of(Probe), "folder": str(job.folder), **job.probe}
                config = pin(config) if config.cfg.transfer else config  # its sources are in the former storage
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
        self._config, self._seed = load_config(experiment, request), seed
        self._kills, self._say, self._numbers = kills, say, itertools.count()
        cfg = self._config.cfg
        engine, reason = ("ray", "it reads a stream") if stream_names(self._config.tree) else engine_for(cfg)
        if engine not in ("local", "in_process"):
            raise ConfigError(f"prove trains on this machine without Ray, but the engine is {engine} ({reason})")
        limits = {
            **{"debug.limit_batches": BATCHES * cfg.accumulate_grad_batches, "num_epochs": 2, "hub.mirror": "null"},
            **{"log_every_steps": 1, "checkpoint_every_steps": EVERY, "keep_checkpoints": 99},
            "elastic.max_failures": 0,
            "max_steps": "null" if cfg.max_steps is None else 2 * BATCHES,
            "evaluate_every_steps": "null" if cfg.evaluate_every_steps is None else 5,
        }
        short = [f"++cfg.{name}={value}" for name, value in limits.items()]
        self._request = replace(request, overrides=(*short, *request.overrides))
        self._config = load_config(experiment, self._request)

    def prove(self) -> Proof:
        """Train and compare all runs. Their folder is removed if everything holds."""
        self._folder, kept = Path(tempfile.mkdtemp(prefix="mlx-proof-")), True
        try:
            (self._folder / "tmp").mkdir()
            with sigterm_stops(StopRequests()), contextlib.closing(take_server()) as self._server:
                checks = self._checks()
            kept = any(check.holds is False for check in checks)
        except BaseException as error:
            kept = isinstance(error, MlxError)  # it names the folder
            raise
        finally:
            shutil.rmtree(self._folder / "tmp" if kept else self._folder, ignore_errors=True)
        return Proof(self._config.cfg.name, self._seed, checks, str(self._folder) if kept else None)

    def _checks(self) -> tuple[Check, ...]:
        whole = self._whole("whole")
        if not all(note["finite"] for notes in whole.notes() for note in notes):
            raise MlxError(f"the weights become infinite or NaN, so nothing is proven; see {whole.folder}")
        first = self._deterministic(whole)
        if first.holds:
            return first, self._resume(whole), self._workers()
        return first, *(Check(name, None, "uninterrupted runs differ already") for name in ("resume", "workers"))

    def _job(self, name: str, *overrides: str, **probe: Any) -> RunJob:
        (folder := self._folder / name).mkdir()
        request = replace(self._request, overrides=(*self._request.overrides, *overrides))
        return RunJob(folder, request, probe)

    def _train(self, job: RunJob, *, fresh: bool = False) -> int:
        """Train a run until its process ends, `fresh` in a new interpreter; return its exit code."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(contextlib.closing(ForkServer(fresh=True))) if fresh else self._server
            server.preload(__name__, "mlx_runtime.workers.worker")
            log = stack.enter_context((job.folder / "log.txt").open("a"))
            variables = {**os.environ, "MLX_DEBUG": "", "TMPDIR": str(self._folder / "tmp")}
            server.start(next(self._numbers), partial(work, job), variables, [log, log])
            while not (ended := list(server.exits(1.0))):
                pass
        return int(ended[0][1])

    def _whole(self, name: str, *overrides: str, fresh: bool = False, **probe: Any) -> RunJob:
        """Return an uninterrupted run that has succeeded."""
        self._say(f"training  {name}")
        job = self._job(name, *overrides, **probe)
        if code := self._train(job, fresh=fresh):
            raise MlxError(f"the run {name!r} failed, so nothing is proven: {_why(job, code)}; see {job.folder}")
        if not job.notes():
            raise MlxError(f"no optimizer has made an update in worker_loop, so nothing is proven; see {job.folder}")
        return job

    def _deterministic(self, whole: RunJob) -> Check:
        found = difference(whole, self._whole("second", fresh=True))
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
        repeats = not notes[0][0]["batches"]  # a loop without a loader repeats an interrupted epoch
        every = None if repeats else self._config.cfg.checkpoint_every_steps
        saved = every or min(
            (item.global_step for item in CheckpointStore(whole.run.checkpoints).all()), default=math.inf
        )
        if not (late := [step for step in updates if step > saved]):
            return Check("resume", None, "no update follows a checkpoint")
        steps = sorted(choice.sample(late, min(self._kills, len(late))))
        kills = [[step, choice.randrange(len(notes)), ("worker", "driver")[n % 2]] for n, step in enumerate(steps)]
        told = ", ".join(f"step {step} ({victim} of rank {rank})" for step, rank, victim in kills)
        told = f"killed in {told} by --seed {self._seed}"
        self._say(f"training  {told}")
        changed = [f"++cfg.elastic.max_failures={len(kills)}", *["++cfg.checkpoint_every_steps=null"] * repeats]
        job = self._job("killed", *changed, kills=kills)
        code = self._train(job)
        for _ in kills:
            if code == -signal.SIGKILL:
                code = self._train(replace(job, request=Request(resume=str(job.run.path))), fresh=True)
        if code:
            return Check("resume", False, f"{told}: it could not be resumed: {_why(job, code)}")
        if found := difference(whole, job):
            causes = found[1] or ("a value in neither a checkpoint nor an attribute, such as a local variable",)
            return Check("resume", False, f"{told}, and resumed: the first difference is {found[0]}", causes)
        starts = {note["process"]: note["step"] for note in reversed(job.notes()[0])}  # the first step of each
        if len([*job.folder.glob("killed_*")]) < len(kills) or [*starts.values()].count(updates[0]) > 1:
            return Check("resume", None, f"{told}, but no checkpoint preceded a kill")
        return Check("resume", True, f"{told}, and resumed: the same bits")

    def _workers(self) -> Check:
        cfg, datasets = self._config.cfg, self._config.tree.get("datasets", {})
        if cfg.strategy == "pipeline" or cfg.replicas.every is not None:
            return Check("workers", None, "updates of pipelines and averaged replicas depend on the number of workers")
        batches = f"debug.limit_batches={BATCHES // 2 * cfg.accumulate_grad_batches}"
        fixed = ("num_epochs=1", "checkpoint_every_steps=null", "elastic.min_workers=null", "elastic.max_workers=null")
        short = [f"++cfg.{item}" for item in (batches, *fixed)]
        sizes = {name: node.get("batch_size") for name, node in datasets.items() if isinstance(node, dict)}
        doubled = [f"datasets.{name}.batch_size={2 * size}" for name, size in sizes.items() if isinstance(size, int)]
        try:
            one = self._whole("one worker", *short, *doubled, "++cfg.start_workers=1", plain=True)
            two = self._whole("two workers", *short, "++cfg.start_workers=2", plain=True)
        except MlxError as error:
            raised = re.search("'two workers' failed.*raised on rank", str(error))
            return Check("workers", False if raised else None, str(error))
        first, last = (one.notes()[0][number] for number in (0, min(1, len(one.notes()[0]) - 1)))
        rows = [sum(notes[0]["rows"] for notes in job.notes()) for job in (one, two)]
        if rows[0] != rows[1] or not rows[0]:
            text = f"an update reads {rows[0]} rows with one worker, and {rows[1]} with two"
            return Check("workers", None, f"{text}; a batch_size in datasets would make them equal")
        found = unequal(one, two)
        if found is None:
            return Check(
                "workers", True, f"2 workers have the weights and metrics of 1, within {TOLERANCE:.0%} of their changes"
            )
        drawn = [key for key in unlike(first["state"], last["state"]) if key.startswith("random")]
        if drawn and not found[1][0].startswith(SCALED):
            return Check("workers", None, f"the loop draws random numbers ({drawn[0]}), and each worker draws its own")
        return Check("workers", False, f"2 workers differ from 1: {found[0]}", found[1])


Found = tuple[str, tuple[str, ...]]
"""What differs first, and likely causes."""

SCALED = "it is scaled by "
"""Beginning of the cause of a difference that no random numbers explain."""


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
        starts = {note["process"]: note for note in reversed(others)}  # the first of each, after it was resumed
        for note in others:
            differs = unlike(known.get((note["step"], note["number"]), before)["state"], note["state"])
            if differs and note["step"] <= min(found)[0]:
                found.append((note["step"] - 0.5, f"{differs[0]} in step {note['step']}, rank {rank}"))
                after = starts[note["process"]]
                before = known.get((after["step"], after["number"]), before)
    return min(found)[1], tuple(_causes(before["hidden"], after["hidden"]))


def _causes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield the values outside of checkpoints that differ between the notes of two runs: generators, then counters."""
    found = set(unlike(before, after)) & {*before} & {*after}
    order = lambda key: (not after[key].startswith("generator"), not after[key].isdecimal(), key)  # noqa: E731
    for key in sorted(found, key=order)[:3]:
        cure = next(cure for prefix, cure in CURES.items() if key.startswith(prefix))
        text = f"{key} is {before[key]} in the uninterrupted run, and {after[key]} in the other: {cure}"
        generator = f"{key} is a random generator whose state no checkpoint contains: draw from torch's, or save it"
        yield generator if after[key].startswith("generator") else text


def unequal(one: RunJob, two: RunJob) -> Found | None:
    """Return the first weight or metric of two workers that is not that of one, within the tolerance."""
    files = [sorted(job.folder.glob("weights_*.pt")) for job in (one, two)]
    first, last, other_first, other_last = (torch.load(job[n], weights_only=True) for job in files for n in (0, -1))
    changes = {key: item - first[key] for key, item in last.items()}
    for key, ours in changes.items():
        model = key.partition(".")[0] + "."
        whole = math.hypot(*(float(item.norm()) for name, item in changes.items() if name.startswith(model)))
        apart = float((other_last[key] - last[key]).norm())
        if not apart <= TOLERANCE * whole + ROUNDING * float(last[key].norm()):  # NaN is not
            theirs = other_last[key] - other_first[key]
            ratio = float((ours * theirs).sum() / ours.square().sum())
            cause = "workers use other rows, or weigh them otherwise: is the model prepared with prepare_model?"
            if abs(ratio - 1) > 0.2 and (theirs - ratio * ours).norm() < 0.3 * theirs.norm():
                cause = f"{SCALED}{ratio:.1g}: return the mean of the loss over the rows, not the sum"
            return f"{key} is {apart:.2g} apart, while the weights of its model change by {whole:.2g}", (cause,)
    for a, b in zip(one.rows(), two.rows(), strict=False):
        for key in unlike(a, b):
            numbers = [math.nan if row.get(key) is None else row[key] for row in (a, b)]
            if not math.isclose(*numbers, rel_tol=TOLERANCE, abs_tol=1e-6):
                cause = "it depends on which worker reads a row: use an object in metrics, which merges them"
                return f"metric {key} in step {a['step']} is {numbers[1]:.6g}, and {numbers[0]:.6g} with one", (cause,)
    return None
