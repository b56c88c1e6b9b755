"""The proof of an experiment: short runs of it that must be equal, killed and resumed or not, with 2 workers or 1."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from mlx_runtime.companions.surgery.probe import DRIVER, Probe, digest
from mlx_runtime.companions.surgery.transferring import pin
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect, in_storage
from mlx_runtime.driver.request import load_config
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.reader import Run
from mlx_runtime.workers.fork_server import ForkServer
from mlx_runtime.workers.local import take_server
from mlx_runtime.workers.placement import engine_for

BATCHES, EVERY = 8, 3
"""Updates per epoch, and between two checkpoints."""

TOLERANCE, ROUNDING = 1e-3, 1e-6
"""Relative differences that two numbers of workers may have: the first of gradients, of metrics, and of weights by the
whole change of their model, because Adam enlarges rounding errors; the second of weights that hardly change."""

VICTIMS = "worker", "driver"
"""What is killed, in turn."""

CLOCKS = re.compile(r"timestamp|date|time_this_iter_s|time_total_s|hostname|node_ip|pid|time/.*|gpu/memory|[^/]+_per_s")
"""Metrics that differ between any two runs."""

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
        "half precision, which is off here: its rounding depends on the rows of a batch",
        "the last two batches of a pass, whose rows are divided among the workers",
    ),
}
"""What differs by design, by check."""

BADGE = (
    "![mlx train prove: deterministic, exact resume, 2 workers = 1]"
    "(https://img.shields.io/badge/mlx-deterministic,_exact_resume,_2_workers_=_1-brightgreen)"
)
"""Line of Markdown for the README of an experiment for which all checks hold."""

SCALED = "the loss is a sum over the rows of a worker, or divided twice: return the mean"
OTHER_ROWS = "workers use other rows, or weigh them otherwise: is the model prepared with prepare_model?"
"""Causes of differences between 2 workers and 1."""


@dataclass(frozen=True)
class Check:
    """The outcome of one comparison."""

    name: str  # a key of `BY_DESIGN`
    holds: bool | None  # None: it cannot be made
    text: str
    causes: tuple[str, ...] = ()  # most likely first


def work(experiment: type[Any], request: Request, folder: Path, probe: Mapping[str, Any]) -> int:
    """Train one run in this process, which the fork server has just started, in the folder of the experiment."""
    os.environ[DRIVER], tempfile.tempdir = str(os.getpid()), os.environ["TMPDIR"]
    config = load_config(experiment, request)
    if config.run is None:
        callback = {"_target_": f"{Probe.__module__}.Probe", "folder": str(folder), **probe}
        config = pin(config) if config.cfg.transfer else config  # its sources are in the former storage
        config = in_storage(config, str(folder / "runs"), callbacks={"probe": callback})
    with connect(config.cfg) as cluster:
        fit(experiment, config, cluster)
    return 0


class Trained:
    """A run of a proof whose process has ended, and the folder of its notes and its storage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, next(folder.glob("runs/*/run_001"), folder / "refused")
        self.run = Run(RunFolder(self.path))
        record = self.run.record if self.path.exists() else {}
        self.status: str | None = record.get("status")  # None: it was refused before it began
        last = (folder / "log.txt").read_text(errors="replace").strip().rpartition("\n")[2]
        self.error = (record.get("error") or last).partition("\n")[0]  # if it has failed
        files = [folder / f"rank_{rank}.jsonl" for rank in range(len([*folder.glob("rank_*.jsonl")]))]
        lines = [[line for line in file.read_text().splitlines() if line[-2:] == "}}"] for file in files]
        self.notes: list[list[dict[str, Any]]] = [[*map(json.loads, of_rank)] for of_rank in lines]  # in order of time

    def rows(self) -> list[dict[str, Any]]:
        """Return what the run has recorded, without times."""
        rows = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if not CLOCKS.fullmatch(key)} for row in rows]


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
        self, experiment: type[Any], request: Request, *, seed: int, kills: int, say: Callable[[str], object]
    ) -> None:
        config = load_config(experiment, request)
        cfg = config.cfg
        self._experiment, self._seed, self._kills, self._say = experiment, seed, kills, say
        limits = {
            **{"debug.limit_batches": BATCHES * cfg.accumulate_grad_batches, "num_epochs": 2, "hub.mirror": "null"},
            **{"log_every_steps": 1, "keep_checkpoints": 99},
            "checkpoint_every_steps": EVERY if config.tree.get("datasets") else "null",  # see `BY_DESIGN`
            "elastic.max_failures": 0,
            "max_steps": "null" if cfg.max_steps is None else 2 * BATCHES,
            "evaluate_every_steps": "null" if cfg.evaluate_every_steps is None else 5,
        }
        short = [f"++cfg.{name}={value}" for name, value in limits.items()]
        self._request = replace(request, overrides=(*short, *request.overrides))
        self._config = load_config(experiment, self._request)
        engine, reason = ("ray", "it reads a stream") if stream_names(self._config.tree) else engine_for(cfg)
        if engine not in ("local", "in_process"):
            raise ConfigError(f"prove trains on this machine without Ray, but the engine is {engine} ({reason})")

    def prove(self) -> tuple[list[Check], str | None]:
        """Train and compare all runs. Return the outcomes, and the folder of the runs, kept if a check has failed."""
        self._folder, kept = Path(tempfile.mkdtemp(prefix="mlx-proof-")), False
        self._say(f"runs      {self._folder}")
        try:
            with contextlib.closing(take_server()) as self._server:
                checks = self._checks()
            kept = any(check.holds is False for check in checks)
            return checks, str(self._folder) if kept else None
        except MlxError as error:
            kept = True
            raise MlxError(f"{error}, so nothing is proven; see {self._folder}") from error
        finally:
            if not kept:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _checks(self) -> list[Check]:
        whole = self._whole("whole")
        first = self._deterministic(whole)
        if first.holds:
            return [first, self._resume(whole), self._workers()]
        return [first, *(Check(name, None, "uninterrupted runs differ already") for name in ("resume", "workers"))]

    def _train(self, name: str, request: Request, *, fresh: bool = False, **probe: Any) -> Trained:
        """Train a run until its process ends, `fresh` in a new interpreter."""
        (folder := self._folder / name).mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            server = ForkServer(fresh=True, folder=Path.cwd()) if fresh else self._server
            stack.callback(server.close if fresh else str)
            server.preload(__name__, "mlx_runtime.workers.worker")
            log = stack.enter_context((folder / "log.txt").open("a"))
            variables = {**os.environ, "TMPDIR": str(folder)}
            server.start(0, partial(work, self._experiment, request, folder, probe), variables, [log, log])
            while not list(server.exits(1.0)):
                pass
        return Trained(folder)

    def _changed(self, *overrides: str) -> Request:
        return replace(self._request, overrides=(*self._request.overrides, *overrides))

    def _whole(self, name: str, *overrides: str, **options: Any) -> Trained:
        """Return an uninterrupted run that has succeeded."""
        self._say(f"training  {name}")
        run = self._train(name, self._changed(*overrides), **options)
        if run.status != "SUCCEEDED":
            raise MlxError(f"the run {name!r} failed: {run.error}")
        if not run.notes:
            raise MlxError(f"no optimizer has made an update in the run {name!r}")
        if not all(math.isfinite(note["gradient"]) for notes in run.notes for note in notes):
            raise MlxError(f"gradients of the run {name!r} become infinite or NaN")
        return run

    def _deterministic(self, whole: Trained) -> Check:
        found = difference(whole, self._whole("second", fresh=True))
        if found is None:
            return Check("deterministic", True, "two uninterrupted runs are equal, bit for bit")
        watched = self._train("deterministic", self._changed("++cfg.deterministic=true"))
        named = (f"with cfg.deterministic=true: {watched.error:.100} …",) if watched.status == "FAILED" else ()
        causes = named or found[1] or ("something depends on time, on threads or on the order of a set",)
        return Check("deterministic", False, f"two uninterrupted runs differ: {found[0]}", causes)

    def _resume(self, whole: Trained) -> Check:
        choice = random.Random(self._seed)
        late = sorted({note["step"] for note in whole.notes[0] if note["saved"] is not None})
        if not late:
            return Check("resume", None, "no update follows a checkpoint")
        steps = sorted(choice.sample(late, min(self._kills, len(late))))
        kills = [[step, choice.randrange(len(whole.notes)), VICTIMS[n % 2]] for n, step in enumerate(steps)]
        told = ", ".join(f"step {step} ({victim} of rank {rank})" for step, rank, victim in kills)
        told = f"killed in {told} by --seed {self._seed}"
        self._say(f"training  {told}")
        run = self._train("killed", self._changed(f"++cfg.elastic.max_failures={len(kills)}"), kills=kills)
        for _ in kills:
            if run.status == "RUNNING":  # according to a driver that was killed
                run = self._train("killed", Request(resume=str(run.path)), fresh=True)
        if run.status != "SUCCEEDED":
            return Check("resume", False, f"{told}: it could not be resumed: {run.error}")
        if found := difference(whole, run):
            causes = found[1] or ("a value in neither a checkpoint nor an attribute, such as a local variable",)
            return Check("resume", False, f"{told}, and resumed: the first difference is {found[0]}", causes)
        if len([*run.folder.glob("killed_*")]) < len(kills):
            return Check("resume", None, f"to be {told}, but a kill failed")
        return Check("resume", True, f"{told}, and resumed: the same bits")

    def _workers(self) -> Check:
        cfg, datasets = self._config.cfg, self._config.tree.get("datasets", {})
        if cfg.strategy == "pipeline" or cfg.replicas.every is not None:
            return Check("workers", None, "updates of pipelines and averaged replicas depend on the number of workers")
        sizes = {name: node.get("batch_size") for name, node in datasets.items() if isinstance(node, dict)}
        doubled = [f"datasets.{name}.batch_size={2 * size}" for name, size in sizes.items() if isinstance(size, int)]
        short = [
            f"++cfg.debug.limit_batches={BATCHES // 2 * cfg.accumulate_grad_batches}",
            *("++cfg.num_epochs=1", "++cfg.checkpoint_every_steps=null", "++cfg.precision=32"),
            *("++cfg.elastic.min_workers=null", "++cfg.elastic.max_workers=null"),
        ]
        try:
            one = self._whole("one worker", *short, *doubled, "++cfg.start_workers=1", plain=True)
            two = self._whole("two workers", *short, "++cfg.start_workers=2", plain=True)
        except MlxError as error:
            began = any(self._folder.glob("two workers/runs/*/run_001"))
            return Check("workers", False if began else None, str(error))
        rows = [sorted(row for notes in run.notes for row in notes[0]["rows"]) for run in (one, two)]
        if rows[0] != rows[1] or not rows[0]:
            text = "the first update of 2 workers reads other rows than that of 1, or none from a loader"
            return Check("workers", None, text)
        found, states = unequal(one, two), [note["state"] for note in one.notes[0]]
        if found is None:
            return Check("workers", True, f"2 workers train as 1 does, within {TOLERANCE:.1%}")
        if found[1] != (SCALED,) and any(key.startswith("random") for key in unlike(states[0], states[-1])):
            return Check("workers", None, "the loop draws random numbers, and each worker draws its own")
        return Check("workers", False, f"2 workers differ from 1: {found[0]}", found[1])


Found = tuple[str, tuple[str, ...]]
"""What differs first, and likely causes."""


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ; NaN equals NaN."""
    return [key for key in {**one, **other} if repr(one.get(key)) != repr(other.get(key))]


def difference(whole: Trained, other: Trained) -> Found | None:
    """Return the first difference between an uninterrupted run and another one; None if they are equal, bit for bit."""
    leaves = [tree_flatten_with_path(run.run.state())[0] for run in (whole, other)]
    states = [{keystr(path): digest(item) for path, item in found} for found in leaves]
    differs = [key for key in unlike(*states) if not key.startswith(("['config']", "['tracking']"))]  # paths and times
    found: list[tuple[float, str]] = [(math.inf, f"{key} in the last checkpoint") for key in differs[:1]]
    for a, b in itertools.zip_longest(whole.rows(), other.rows(), fillvalue=dict[str, Any]()):
        found += [((a or b)["step"], f"metric {key} in step {(a or b)['step']}") for key in unlike(a, b)]
    if not found:
        return None
    causes: list[str] = []
    for rank, (notes, others) in enumerate(zip(whole.notes, other.notes, strict=False)):
        known = {(note["step"], note["number"]): note for note in notes}
        for note in others:
            twin = known.get((note["step"], note["number"]), note)
            differs = unlike(twin["state"], note["state"])
            found += [(note["step"] - 0.5, f"{key} in step {note['step']}, rank {rank}") for key in differs[:1]]
            causes = causes or [*_causes(twin["hidden"], note["hidden"])]
    return min(found)[1], tuple(causes)


def _causes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield the values outside of checkpoints that differ between the notes of two runs: generators, then counters."""
    found = set(unlike(before, after)) & {*before} & {*after}
    order = lambda key: (not after[key].startswith("generator"), not after[key].isdecimal(), key)  # noqa: E731
    for key in sorted(found, key=order)[:3]:
        values = f"{before[key]} in the uninterrupted run, and {after[key]} in the other"
        yield f"{key} is {values}: no checkpoint contains it; register a buffer, or give a tool a state_dict"


def unequal(one: Trained, two: Trained) -> Found | None:
    """Return the first gradient, weight or metric of two workers that is not that of one, within the tolerance."""
    a, b = (run.notes[0][0]["gradient"] for run in (one, two))
    if not close(a, b):
        ratio = b / a if a else math.inf
        cause = SCALED if any(close(ratio, scale) for scale in (0.5, 2.0)) else OTHER_ROWS
        return f"the norm of the first gradient is {ratio:.4g} times that of one", (cause,)
    files = [sorted(run.folder.glob("weights_*.pt")) for run in (one, two)]
    first, last, others = (torch.load(file, weights_only=True) for file in (files[0][0], files[0][-1], files[1][-1]))
    for key, item in last.items():
        model = ".".join(key.split(".")[:2]) + "."
        change = math.hypot(*(float((last[name] - first[name]).norm()) for name in last if name.startswith(model)))
        apart = float((others[key] - item).norm())
        if not apart <= TOLERANCE * change + ROUNDING * float(item.norm()):  # NaN is not
            return f"{key} is {apart:.2g} apart, while the weights of its model change by {change:.2g}", (OTHER_ROWS,)
    for a, b in zip(one.rows(), two.rows(), strict=False):
        for key in unlike(a, b):
            if not close(a.get(key), b.get(key)):
                cause = "it depends on which worker reads a row: use an object in metrics, which merges them"
                return f"metric {key} in step {a['step']} is {b.get(key)}, and {a.get(key)} with one", (cause,)
    return None


def close(one: Any, other: Any) -> bool:
    """Return True for numbers that are equal within the tolerance."""
    numbers = all(isinstance(item, int | float) for item in (one, other))
    return numbers and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=ROUNDING)
