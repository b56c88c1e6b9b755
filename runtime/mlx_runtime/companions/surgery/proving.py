"""The proof of an experiment: short runs of it that must be equal, killed and resumed or not, with 2 workers or 1."""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.surgery.probe import KILLS, Probe
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
from mlx_runtime.runs.folder import RunFolder, list_runs, read_rows
from mlx_runtime.workers.fork_server import exit_reason
from mlx_runtime.workers.local import cool_down, take_server, warm_up
from mlx_runtime.workers.placement import engine_for

BATCHES, EVERY = 8, 3
"""Updates per epoch, and between two checkpoints."""

TOLERANCE = 1e-3
"""Relative difference of the first gradient that two numbers of workers may have; ten times as much later."""

CLOCKS = re.compile(r"time|date|hostname|node_ip|pid$|.*_per_s$")
"""Metrics that differ between any two runs."""

NO_OPERATION = re.compile(r"(\w+) does not have a deterministic implementation")
"""Beginning of torch's warning about an operation."""

BY_DESIGN = {
    "resume": ("times, rates and process ids in metrics.jsonl", "trackers and callbacks, which are left out here"),
    "workers": (
        "dropout, which is off here: each worker draws its own random numbers (cfg.seed plus its rank)",
        "BatchNorm, which is in eval mode here: each worker normalizes by its own rows",
        "the last two batches of a pass, whose rows are divided among the workers",
    ),
}
"""What differs by design, by check."""


@dataclass(frozen=True)
class Check:
    """The outcome of one comparison."""

    name: str  # `deterministic`, `resume` or `workers`
    holds: bool | None  # None: it cannot be compared
    text: str
    causes: tuple[str, ...] = ()  # most likely first

    @property
    def by_design(self) -> tuple[str, ...]:
        return BY_DESIGN.get(self.name, ())


@dataclass(frozen=True)
class Proof:
    """The outcome of all comparisons."""

    experiment: str
    seed: int
    checks: tuple[Check, ...]
    folder: Path | None  # of the runs, kept if a check has failed

    @property
    def holds(self) -> bool:
        return all(check.holds is not False for check in self.checks)

    @property
    def badge(self) -> str:
        """Line of Markdown for a README; empty if a check has failed."""
        titles = {"deterministic": "deterministic", "resume": "exact resume", "workers": "2 workers = 1"}
        text = " | ".join(titles[check.name] for check in self.checks if check.holds)
        label = text.replace(" ", "_").replace("|", "%7C").replace("=", "%3D")
        return f"![mlx train prove: {text}](https://img.shields.io/badge/mlx-{label}-brightgreen)" if self.holds else ""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    step: float  # infinite for one in the last checkpoint only
    title: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunJob:
    """A run of a proof, for its process."""

    folder: Path  # of its notes and its storage
    request: Request
    plain: bool = False

    @property
    def run(self) -> RunFolder:
        """The run, once it has begun."""
        (experiment,) = (path for path in (self.folder / "runs").iterdir() if not path.name.startswith("."))
        return list_runs(str(self.folder / "runs"), experiment.name)[0]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def notes(self) -> list[list[dict[str, Any]]]:
        """Return the notes of each rank, in the order of time."""
        files = sorted(self.folder.glob("rank_*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank_")))
        found = [file.read_text().splitlines(keepends=True) for file in files]
        return [[json.loads(line) for line in lines if line.endswith("\n")] for lines in found]

    def rows(self) -> list[dict[str, Any]]:
        """Return what the run has recorded, without times."""
        rows = (row for _, row in read_rows(self.run.metrics.read_bytes()) if row is not None)
        return [{key: value for key, value in row.items() if not CLOCKS.match(key)} for row in rows]

    def state(self) -> dict[str, Any]:
        """Return the last checkpoint, without paths and times."""
        store = CheckpointStore(self.run.checkpoints)
        return {key: item for key, item in store.load(store.all()[-1]).items() if key not in ("config", "tracking")}


def work(job: RunJob) -> int:
    """Train one run in this process, which the fork server has just started, in the folder of the experiment."""
    warm_up()  # before anything starts threads
    with clean_exit():
        try:
            experiment = main_class(AN_EXPERIMENT, Path.cwd())
            config = load_config(experiment, job.request)
            if config.run is None:
                probe = {"_target_": path_of(Probe), "folder": str(job.folder), "plain": job.plain}
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
        self, experiment: type, request: Request, *, seed: int, kills: int, say: Callable[[str], None]
    ) -> None:
        self._config = load_config(experiment, request)
        cfg, self._request = self._config.cfg, request
        if stream_names(self._config.tree) or engine_for(cfg)[0] not in ("local", "in_process"):
            raise ConfigError("prove trains on this machine without Ray: leave out cfg.engine, and streams of Ray Data")
        self._seed, self._kills, self._say = seed, kills, say
        self._numbers = itertools.count()
        self._server: Any = None
        limits = {"debug.limit_batches": BATCHES * cfg.accumulate_grad_batches, "num_epochs": 2, "max_steps": "null"}
        limits |= {"log_every_steps": 1, "checkpoint_every_steps": EVERY, "keep_checkpoints": 99}
        limits |= {"max_steps": 2 * BATCHES} if cfg.max_steps is not None else {}
        limits |= {"evaluate_every_steps": 5} if cfg.evaluate_every_steps is not None else {}
        self._short = tuple(f"++cfg.{name}={value}" for name, value in limits.items())

    def prove(self) -> Proof:
        """Run everything. The folder of the runs is removed if everything holds."""
        self._folder = Path(tempfile.mkdtemp(prefix="mlx-proof-"))
        self._server = take_server()
        self._server.preload(__name__, "mlx_runtime.workers.worker")
        checks: list[Check] = []
        try:
            whole = self._whole("whole")
            checks.append(self._deterministic(whole))
            if checks[0].holds:
                checks += [self._resume(whole), self._workers()]
        finally:
            self._server.close()
            if checks and all(check.holds is not False for check in checks):
                shutil.rmtree(self._folder)
        kept = self._folder if self._folder.exists() else None
        return Proof(self._config.cfg.name, self._seed, tuple(checks), kept)

    def _job(self, name: str, *overrides: str, plain: bool = False) -> RunJob:
        (folder := self._folder / name).mkdir()
        words = (*self._short, *self._request.overrides, "++cfg.hub.mirror=null", *overrides)
        return RunJob(folder, dataclasses.replace(self._request, overrides=words), plain)

    def _train(self, job: RunJob) -> int:
        """Train a run until its process ends, and return its exit code."""
        with (job.folder / "log.txt").open("a") as log:
            self._server.start(next(self._numbers), partial(work, job), {**os.environ, "MLX_DEBUG": ""}, [log, log])
        while not (ended := list(self._server.exits(1.0))):
            pass
        return int(ended[0][1])

    def _whole(self, name: str, *overrides: str, plain: bool = False) -> RunJob:
        """Return an uninterrupted run that has succeeded."""
        self._say(f"training  {name}")
        job = self._job(name, *overrides, plain=plain)
        if code := self._train(job):
            raise MlxError(
                f"the run {name!r} failed, which proves nothing: {_why(job, code)}; see {job.folder}/log.txt"
            )
        if not job.notes():
            raise MlxError(f"the run {name!r} made no update with an optimizer of torch, so there is nothing to prove")
        return job

    def _deterministic(self, whole: RunJob) -> Check:
        again = self._whole("again")
        if (found := difference(whole, again, "again")) is None:
            steps = len({note["step"] for note in whole.notes()[0]})
            return Check("deterministic", True, f"two uninterrupted runs of {steps} updates are equal, bit for bit")
        named: set[str] = set()
        if not self._config.cfg.deterministic:
            job = self._job("deterministic", "++cfg.deterministic=true")
            self._train(job)
            named = {*NO_OPERATION.findall(job.log)}
        operations = tuple(f"the operation {name}, says torch.use_deterministic_algorithms" for name in sorted(named))
        causes = operations + found.causes + () if operations or found.causes else (_time_or_threads(found),)
        return Check("deterministic", False, f"two uninterrupted runs differ: {found.title}", causes)

    def _resume(self, whole: RunJob) -> Check:
        choice, ranks = random.Random(self._seed), len(whole.notes())
        first = min(item.global_step for item in CheckpointStore(whole.run.checkpoints).all())
        every = self._config_of(whole)["checkpoint_every_steps"] or first
        steps = sorted({note["step"] for note in whole.notes()[0] if note["step"] > min(first, every)})
        if not steps:
            return Check("resume", None, "no update follows the first checkpoint")
        kills = [
            {"step": step, "rank": choice.randrange(ranks), "victim": "driver" if number % 2 else "worker"}
            for number, step in enumerate(sorted(choice.sample(steps, min(self._kills, len(steps)))))
        ]
        told = ", ".join(
            f"step {kill['step']} ({'driver' if kill['victim'] == 'driver' else 'worker ' + str(kill['rank'])})"
            for kill in kills
        )
        self._say(f"training  killed in {told}")
        job = self._job("killed", "++cfg.elastic.max_failures=-1")
        (job.folder / KILLS).write_text(json.dumps(kills))
        code = self._train(job)
        while code == -signal.SIGKILL:
            resumed = dataclasses.replace(job, request=Request(resume=str(job.run.path)))
            code = self._train(resumed)
        if code:
            return Check("resume", False, f"killed in {told}, it could not be resumed: {_why(job, code)}")
        assert len([*job.folder.glob("killed_*")]) == len(kills), "each kill has happened"
        if (found := difference(whole, job, "resumed")) is None:
            return Check("resume", True, f"killed in {told}, and resumed: the same bits")
        causes = found.causes or ("a value that neither a checkpoint nor an attribute contains",)
        return Check("resume", False, f"killed in {told}: {found.title}", causes)

    def _workers(self) -> Check:
        cfg = self._config.cfg
        if cfg.strategy == "pipeline" or cfg.replicas.every is not None:
            setting = "strategy=pipeline" if cfg.strategy == "pipeline" else "replicas.every"
            return Check("workers", None, f"not compared: with cfg.{setting}, updates depend on the number of workers")
        sized = (
            [name for name, node in self._config.tree["datasets"].items() if "batch_size" in (node or ())]
            if ("datasets" in self._config.tree)
            else []
        )
        sizes = {name: self._config.tree["datasets"][name]["batch_size"] for name in sized}
        short = ("++cfg.num_epochs=1", "++cfg.checkpoint_every_steps=null", "++cfg.elastic.min_workers=null")
        short += (f"++cfg.debug.limit_batches={4 * cfg.accumulate_grad_batches}", "++cfg.elastic.max_workers=null")
        two = self._whole("two workers", *short, "++cfg.start_workers=2", plain=True)
        doubled = [f"datasets.{name}.batch_size={2 * size}" for name, size in sizes.items() if isinstance(size, int)]
        one = self._whole("one worker", *short, *doubled, "++cfg.start_workers=1", plain=True)
        begun = one.notes()[0][:2]
        if not begun[0]["rows"]:
            return Check("workers", None, "not compared: the loop reads no loader, so there is no global batch")
        rows = [sum(notes[0]["rows"] for notes in job.notes()) for job in (one, two)]
        if rows[0] != rows[1]:
            text = f"not compared: an update reads {rows[0]} rows with one worker and {rows[1]} with two"
            return Check("workers", None, f"{text}; give the dataset an argument batch_size")
        found = _unequal(one, two)
        if found is None:
            return Check("workers", True, "2 workers and 1 have the same gradients and metrics, within rounding")
        drawn = [{key: value for key, value in note["state"].items() if key.startswith("random")} for note in begun]
        if drawn[0] != drawn[-1]:
            return Check("workers", None, "not compared: the loop draws random numbers, and each worker has its own")
        return Check("workers", False, f"2 workers differ from 1: {found.title}", found.causes)

    @staticmethod
    def _config_of(job: RunJob) -> dict[str, Any]:
        from mlx_runtime.config.interpolation import parse_config

        return dict(parse_config(job.run.conf.read_bytes())["cfg"])


def _why(job: RunJob, code: int) -> str:
    """Return the error of a run that has failed."""
    lines = [line.removeprefix("error: ") for line in job.log.splitlines() if line.startswith("error: ")]
    return lines[-1] if lines else f"it {exit_reason(code)}"


def _time_or_threads(found: Difference) -> str:
    part = "the dataset, or what it reads" if found.title.startswith("batches") else "the loop, a loss or a model"
    return f"something in {part} that depends on time, threads or the order of a set; torch names no operation"


def difference(one: RunJob, other: RunJob, title: str) -> Difference | None:
    """Return the first difference between an uninterrupted run and another one; None if they are equal, bit for bit.

    `title` is a word for the other run.
    """
    last = next(_unlike(one.state(), other.state()), None)
    pairs = itertools.zip_longest(one.rows(), other.rows(), fillvalue={})
    recorded = next(
        (
            Difference((a or b)["step"], f"metric {key} in step {(a or b)['step']}: {a.get(key)} and {b.get(key)}")
            for a, b in pairs
            for key in a | b
            if not _same(a.get(key), b.get(key))
        ),
        None,
    )
    if last is None and recorded is None:
        return None
    noted = min(_noted(one, other, title), key=lambda item: item.step, default=None)
    if noted is not None and (recorded is None or noted.step <= recorded.step):
        return noted
    causes = noted.causes if noted is not None else _hidden(one.notes()[0][-1], other.notes()[0][-1], title)
    if recorded is not None:
        return dataclasses.replace(recorded, causes=causes)
    return Difference(math.inf, f"{last} in the last checkpoint", causes)


def _noted(one: RunJob, other: RunJob, title: str) -> Iterator[Difference]:
    """Yield the first difference between the notes of each rank."""
    for rank, (notes, others) in enumerate(zip(one.notes(), other.notes(), strict=False)):
        known = {(note["step"], note["number"]): note for note in notes}
        begun: dict[int, dict[str, Any]] = {}  # first note of each process
        for note in others:
            before = known.get((note["step"], note["number"]))
            first = begun.setdefault(note["process"], note)
            if before is None:
                yield Difference(note["step"], f"step {note['step']} of rank {rank}, which only one of them makes")
                break
            unlike = [key for key, value in note["state"].items() if before["state"].get(key) != value]
            unlike = [key for key in unlike if not key.startswith("batches")] if first is not note else unlike
            if unlike:
                start = known[first["step"], first["number"]]
                causes = _hidden(start, first, title) or _hidden(before, note, title)
                yield Difference(note["step"], f"{unlike[0]} in step {note['step']} on rank {rank}", causes)
                break


def _hidden(before: Mapping[str, Any], after: Mapping[str, Any], title: str) -> tuple[str, ...]:
    """Return causes: the values outside of checkpoints that differ between two notes, most likely first."""
    pairs = {key: (before["hidden"].get(key), value) for key, value in after["hidden"].items()}
    unlike = {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and None not in pair}

    def likelihood(key: str) -> tuple[bool, bool, bool, str]:
        value = str(unlike[key][1])
        return key.startswith("local"), not value.startswith("generator"), not value.isdecimal(), key

    return tuple(_cause(key, *unlike[key], title) for key in sorted(unlike, key=likelihood)[:3])


def _cause(key: str, one: str, other: str, title: str) -> str:
    if one.startswith("generator"):
        return f"{key} is a random generator of its own, whose state no checkpoint contains: use torch's, or save it"
    what = f"{key} is {one} in the uninterrupted run and {other} in the {title} one"
    if key.startswith("datasets."):
        return f"{what}: the dataset has a state in the worker; compute a row from its number only"
    if key.startswith("models."):
        return f"{what}: it is an attribute that the state_dict lacks; register a buffer"
    return f"{what}: no checkpoint contains it; keep it in a tool, or in a class with a state_dict"


def _unlike(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Yield the keys at which two states are not bit-identical."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
        yield from () if same else (at,)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from _unlike(one.get(key), other.get(key), f"{at}.{key}".lstrip("."))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for number, (a, b) in enumerate(itertools.zip_longest(one, other)):
            yield from _unlike(a, b, f"{at}.{number}")
    elif not _same(one, other):
        yield at


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().contiguous().view(torch.uint8) if tensor.numel() else tensor


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _unequal(one: RunJob, two: RunJob) -> Difference | None:
    """Return the first gradient or metric of two workers that is not that of one, within tolerance."""
    files = sorted(file.name for file in one.folder.glob("gradients_*.pt"))
    for number, name in enumerate(files, start=1):
        ours, theirs = (torch.load(job.folder / name, weights_only=True) for job in (one, two))
        total = _norm(ours.values())
        for key, gradient in ours.items():
            other = theirs.get(key)
            if other is None:
                return Difference(number, f"{key} of update {number} is missing")
            tolerance = TOLERANCE if number == 1 else 10 * TOLERANCE
            if (gradient - other).norm() > tolerance * (gradient.norm() + total * (1e-3 if number == 1 else 1)):
                ratio = float((gradient * other).sum() / gradient.square().sum())
                cause = "rows of one worker only are used, or the model is not prepared with prepare_model"
                if (other - ratio * gradient).norm() < 0.01 * other.norm():
                    cause = f"gradients are {ratio:.2g} times as large: the loss is a sum, so return its mean over rows"
                return Difference(number, f"{key} in update {number}", (cause,))
    for a, b in zip(one.rows(), two.rows(), strict=False):
        for key in a:
            if not isinstance(a[key], int | float) or key not in b:
                continue
            if not _same(a[key], b[key]) and not math.isclose(a[key], b[key], rel_tol=10 * TOLERANCE, abs_tol=1e-6):
                text = f"metric {key} in step {a['step']}: {b[key]:.6g} with 2 workers and {a[key]:.6g} with 1"
                cause = f"{key} is computed per worker: use an object in metrics, which merges all workers"
                return Difference(a["step"], text, (cause,))
    return None


def _norm(tensors: Sequence[torch.Tensor] | Any) -> float:
    return math.sqrt(sum(float(item.square().sum()) for item in tensors))
