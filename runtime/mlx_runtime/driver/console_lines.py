"""The lines that a run prints at its start, at its end, and about events in between."""

import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_runtime import companions, events
from mlx_runtime.driver.planning import RunPlan
from mlx_runtime.loop.options import STRATEGIES, strategy_class
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import position
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.tables import format_duration, plural, shorten
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import split_options
from mlx_runtime.storage.redaction import secret_keys
from mlx_runtime.tracking.console import Display


class ConsoleLines:
    """Prints events as lines on a display."""

    def __init__(self, display: Display, plan: RunPlan) -> None:
        self._display, self._print, self._plan = display, display.print, plan
        self._started = time.monotonic()
        self._world_size = 0
        self._logged: tuple[str, ...] = ()
        self._run: events.RunInfo | None = None
        self._rows_before: Mapping[str, Any] = {}  # facts about each dataset, of the run that is resumed

    def handle(self, event: events.Event) -> None:
        match event:
            case events.RunStarted(run):
                self._run = run
                self._start(run)
            case events.DatasetsPrepared(names, root, created):
                self._print(f"prepared  {', '.join(names)}: read from {root} (made {created[:10]})")
            case events.WorkersWaiting(why):
                self._print(f"waiting   for {why}")
            case events.WorkersStarted():
                self._workers_started(event)
            case events.LoaderOpened(name, training, rows, steps, global_batch, updates):
                before = self._rows_before.get(name, {}).get("rows", rows)
                if before != rows:
                    self._print(f"changed   datasets.{name} has {rows:,} rows; before, it had {before:,}", always=True)
                if training:
                    number = plural(steps, "step") + (f", {plural(updates, 'update')}" if updates != steps else "")
                    self._print(f"{name:<9} {rows:,} rows in {number}, global batch {global_batch:,}")
            case events.WorkersLost(ranks, why):
                self._print(f"lost      rank {', '.join(map(str, ranks))}: {why:.200}")
            case events.StopRequested(why):
                self._print(f"stopping  after this step, with a checkpoint ({why})", always=True)
            case events.LoopEnded():
                self._logged = event.logged
            case events.RunEnded(status="SUCCEEDED"):
                self._end(event)
        self._display.handle(event)

    def _start(self, run: events.RunInfo) -> None:
        config, cfg = self._plan.config, self._plan.config.cfg
        if config.checkpoint is not None:
            assert config.origin is not None
            self._print(f"evaluate  {config.origin.title}, {config.checkpoint}")
        elif config.fast:
            batches = cfg.debug.limit_batches or "all"
            self._print(f"run       {run.experiment}, fast dev run: {batches} batches per pass, nothing is kept")
        else:
            self._print(f"run       {run.experiment} {run.name}")
            self._print(f"folder    {run.place}", always=True)
        for line in config.notes:
            self._print(line, always=True)
        if config.run is not None:
            from mlx_runtime.loop.resuming import change_lines  # here, because a new run changes nothing

            self._rows_before = records.load_record(config.run).get("datasets") or {}
            for line in change_lines(config.run, self._plan.project, config.changes):
                self._print(line)
        else:
            for change in config.changes:
                self._print(f"changed   {change}")
        self._workers()
        if (written := list(secret_keys(config.unresolved))) and not config.fast:
            self._print(f"note      conf.yaml of the run contains {', '.join(written)} in plain text")
            self._print("          to keep a secret out of it, read it from an environment variable: ${oc.env:NAME}")

    def _workers(self) -> None:
        cluster, cfg = self._plan.cluster, self._plan.config.cfg
        number, (fewest, most) = cfg.start_workers, self._sizes
        elastic = f"{fewest} to " if fewest < most else ""
        strategy = STRATEGIES.get(cfg.strategy, cfg.strategy).rpartition(".")[2]
        workers = f"{elastic}{plural(most, f'{strategy} worker')} " if number else ""
        self._print(f"workers   {workers}{cluster.title}{f' ({cluster.why})' if cluster.why else ''}")
        if cfg.use_gpu is None and cluster.gpus and not cluster.use_gpu:
            gpus, fit = f"{cluster.gpus:g} GPU{'s' * (cluster.gpus != 1)}", int(cluster.gpus) // cfg.gpus_per_worker
            hint = f"cfg.start_workers={fit} trains on GPUs; cfg.use_gpu=false selects CPUs"
            self._print(f"warning   training on CPUs, with {gpus} for {number} workers. {hint}", always=True)

    @property
    def _sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of workers that may train."""
        cfg = self._plan.config.cfg
        return cfg.elastic.min_workers or cfg.start_workers, cfg.elastic.max_workers or cfg.start_workers

    def _workers_started(self, event: events.WorkersStarted) -> None:
        before, self._world_size = self._world_size, event.world_size
        if before:
            number = f"{before} → {event.world_size}" if before != event.world_size else str(before)
            self._print(f"workers   {number}: restarted")
            return
        if self._sizes[0] < self._sizes[1]:
            self._print(f"workers   {event.world_size} started")
        cfg = self._plan.config.cfg
        threads = f"{plural(cfg.cpus_per_worker, 'thread')} per worker"
        named = "fp32" if cfg.precision == 32 else cfg.precision
        precision = f", {named}" if strategy_class(cfg.strategy).library == "torch" else ""  # JAX: that of each layer
        trained = f", {event.trained:,} trained" if event.trained not in (None, event.parameters) else ""
        self._print(f"device    {event.device}{precision}, {threads}, {event.parameters:,} parameters{trained}")
        for line in event.sharded:
            self._print(f"sharded   {line}")

    def _end(self, event: events.RunEnded) -> None:
        config, run = self._plan.config, self._run
        assert run is not None
        names = [name for name in event.metrics if name.startswith("test") or name in self._logged]
        if config.checkpoint is not None or Settings.read().quiet:  # there is no table of epochs
            names = list(event.metrics)
        rows = {shorten(name): f"{event.metrics[name]:.4f}" for name in sorted(names)}
        if event.best and config.kept:
            path = split_options(event.best["path"])[0].removeprefix(f"{split_options(run.place)[0]}/")
            rows[f"best {config.cfg.monitor}"] = f"{event.best['value']:.4f} ({position(event.best)}, {path})"
        elif config.cfg.monitor and config.kept and event.status == "SUCCEEDED":
            rows[f"best {config.cfg.monitor}"] = "none: no checkpoint has a finite value of it"
        rows["took"] = f"{time.monotonic() - self._started:.1f} s"
        if config.run is not None:
            from mlx_runtime.runs.queries.listing import summarize  # here, because new runs do not need it

            rows["took"] += f", {format_duration(summarize([config.run])[0].duration_s)} in all attempts"
        if event.evaluation is not None:
            rows["recorded"] = event.evaluation
        elif config.fast:
            rows["run"] = "without an error; nothing of this run is kept"
        else:
            rows |= {"run": run.place, "TensorBoard": _board_command(run, config.overrides)}
        width = max(map(len, rows)) + 2
        self._print(always=True)
        for name, value in rows.items():
            self._print(f"{name:<{width}}{value}", always=True)


def resume_command(run: RunFolder, overrides: tuple[str, ...]) -> str:
    """Return the command that resumes a run."""
    named = any(item.lstrip("+").startswith(("cfg.name=", "--variant=")) for item in overrides)
    name = run.location if _elsewhere(overrides) else run.title if named else run.name
    job = Settings.read().job
    kind = companions.jobs_at(job["address"]) if job else None
    verb = kind.launch.split() if kind else ["run"]
    return shlex.join(["mlx", "train", *verb, f"--resume={name}"])


def _board_command(run: events.RunInfo, overrides: tuple[str, ...]) -> str:
    """Return the command that opens TensorBoard: the short form where it works, otherwise one for any folder."""
    words = [run.place] if _elsewhere(overrides) else [run.experiment, run.name]
    if Settings.read().job or (shutil.which("mlx") and len(words) > 1):
        return shlex.join(["mlx", "xp", "board", *words])
    return shlex.join([str(Path(sys.executable).with_name("mlx")), "xp", "board", run.place])


def _elsewhere(overrides: tuple[str, ...]) -> bool:
    """Return True if a run is not in the storage of conf.yaml, so that only its path identifies it."""
    settings = Settings.read()
    return bool(settings.job or settings.storage) or any(
        item.lstrip("+").startswith(("cfg.storage_path", "--variant=")) for item in overrides
    )
