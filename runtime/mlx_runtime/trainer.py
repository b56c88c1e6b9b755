"""Train one experiment: make the run folder, start the workers, show what they say, write down how it ended."""

import contextlib
import dataclasses
import datetime
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from mlx_runtime import checkpoints, datasets, preparation, registry, snapshots
from mlx_runtime.callbacks import Listeners, Report, RunInfo
from mlx_runtime.cluster import Cluster, on_ray, start_ray
from mlx_runtime.control import Control, Terminated
from mlx_runtime.datasets import Reading
from mlx_runtime.declarations import Declaration, declaring
from mlx_runtime.engines import Engine, local
from mlx_runtime.engines.processes import held_signals
from mlx_runtime.errors import (
    ConfigError,
    HangError,
    MlxError,
    RunStopped,
    StorageError,
    UsageError,
    WorkerLoopError,
    WorkerLostError,
    first_line,
    message_of,
)
from mlx_runtime.experiment import BaseModule
from mlx_runtime.layout import EVALUATIONS, RunFolder, claim_run, prepared_root, storage_root
from mlx_runtime.loading import Config, build, build_cfg
from mlx_runtime.logs import Log
from mlx_runtime.prepared import PreparedSet, Store
from mlx_runtime.progress import STOP, WHERE, Display, Event, Receiver, at_breakpoint
from mlx_runtime.redaction import redacted, redacted_override, secret_keys
from mlx_runtime.settings import Settings
from mlx_runtime.signatures import object_at, path_of
from mlx_runtime.storage import Storage, joined, to_json
from mlx_runtime.training import Ending, Job, described, streams_of
from mlx_runtime.watching import ANSWER_S, verdict

PHASE_S = 2.0
"""A phase of starting that takes longer is announced."""


@dataclass
class Result:
    """How a run ended.

    Attributes:
        folder: of the run.
        metrics: the latest value of every recorded number, like `{"test/accuracy": 0.98}`.
        best: epoch, checkpoint path and value of the best checkpoint by `cfg.monitor`, or None.
    """

    folder: RunFolder
    metrics: dict[str, float]
    best: dict[str, Any] | None = None


def fit(experiment: type[BaseModule], config: Config, cluster: Cluster) -> Result:
    """Train an experiment, as a new run or going on with the one that the config names.

    Args:
        experiment: its class, importable by name.
        config: checked, from `load_config`.
        cluster: from `connect`.

    Raises:
        DatasetError: a dataset that cannot be batched; nothing was started.
        UsageError: another driver trains the run.
        StorageError: the run folder cannot be written.
        WorkerLoopError: user code raised.
        WorkerLostError: workers were lost more often than `cfg.max_failures`.
        HangError: workers waited for each other for `cfg.hang_timeout_s`.
        RunStopped: Ctrl-C or SIGTERM; the run is marked STOPPED.
    """
    _check_datasets(config)
    if config.checkpoint is not None:
        _refuse_evaluation(experiment)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(_settled(config, cluster))
        engine = _engine(config, cluster)
        stack.callback(engine.close)
        cfg = config.cfg
        if cfg.restore_checkpoint_path and config.run is None:
            checkpoints.read(cfg.restore_checkpoint_path)
        if config.run is not None:
            _refuse_without_checkpoint(config.run)
        reading = _reading(config, cluster)
        if not config.kept:
            config = stack.enter_context(_nowhere(config))
        held = stack.enter_context(contextlib.ExitStack())
        record, attempt = _claimed(config, cluster, held)
        log = stack.enter_context(Log(record.folder))
        if attempt > 1:
            log.write(f"\n--- {registry.now()}: attempt {attempt}\n")
        try:
            return _fit(experiment, config, cluster, engine, reading, record, attempt, log, held)
        except BaseException as error:
            log.write(f"error: {message_of(error)}\n")
            raise


@contextlib.contextmanager
def _nowhere(config: Config) -> Iterator[Config]:
    """The same config with nobody who listens, and a storage that is gone after the block.

    Prepared sets are those of the real one.
    """
    prepared = "auto" if config.cfg.prepared == "make" else config.cfg.prepared  # making takes long
    with tempfile.TemporaryDirectory(prefix="mlx-fast-", ignore_cleanup_errors=True) as storage:
        changed: dict[str, Any] = {"storage_path": storage, "prepared_path": _root(config.cfg), "prepared": prepared}
        changed |= {"trackers": {}, "callbacks": {}}
        tree, unresolved = (one | {"cfg": one["cfg"] | changed} for one in (config.tree, config.unresolved))
        yield dataclasses.replace(config, tree=tree, unresolved=unresolved, cfg=build_cfg(tree["cfg"]))


def _refuse_evaluation(experiment: type[BaseModule]) -> None:
    """Only the user's code knows how its models are evaluated.

    Raises:
        UsageError: the experiment does not say how.
    """
    if experiment.eval_loop is BaseModule.eval_loop:
        raise UsageError(
            f"{experiment.__name__} has no eval_loop(self, dataset_shards), which is what mlx train eval runs; "
            "write it in src/experiment.py, like worker_loop without the training"
        )


def _record_evaluation(config: Config, metrics: Mapping[str, float]) -> str:
    """Store what was measured in the folder of the run that the checkpoint is of. Returns where.

    Raises:
        StorageError: it cannot be written.
    """
    assert config.origin is not None
    assert config.checkpoint is not None
    when = datetime.datetime.now(datetime.timezone.utc)
    facts = {"time": when.isoformat(timespec="seconds"), "checkpoint": config.checkpoint, "metrics": dict(metrics)}
    facts |= registry.provenance(config.overrides) | {"workers": config.cfg.start_workers, "seed": config.cfg.seed}
    parts = (EVALUATIONS, f"{when:%Y-%m-%dT%H%M%S.%f}-{uuid.uuid4().hex[:6]}.json")  # in the order of time
    storage = Storage(config.origin.place)
    try:
        if storage.local:
            Path(storage.of(EVALUATIONS)).mkdir(exist_ok=True)
        storage.write(to_json(facts).encode(), *parts)
    except OSError as error:
        raise StorageError(f"cannot write {config.origin.place}/{EVALUATIONS}: {first_line(error)}") from error
    return joined(config.origin.place, *parts)


def _display(config: Config, log: Log) -> Display:
    """What draws a run on this process's terminal or pipe, and completely into the log."""
    epochs = config.cfg.num_epochs
    if Settings.read().quiet:
        return Display(log.screen, cast(TextIO, log), epochs=epochs, quiet=True)
    return Display(sys.stdout, log.copy, epochs=epochs)


def _fit(
    experiment: type[BaseModule],
    config: Config,
    cluster: Cluster,
    engine: Engine,
    reading: Reading,
    record: registry.Record,
    attempt: int,
    log: Log,
    held: contextlib.ExitStack,
) -> Result:
    """Train the run that was claimed; `held` has signals that wait until somebody records how it ends."""
    cfg, folder = config.cfg, record.folder
    display = _display(config, log)
    progress = _Progress(record, display, config, Listeners(cfg.callbacks, "callbacks", display.print))
    control = Control(folder, attempt)
    in_use = _InUse()
    with _recorded_end(progress, control), control, in_use, record.alive(in_use.refresh):
        held.close()
        if not record.held:
            progress.begin()
        if cluster.engine == "in_process":
            in_use.enter_context(at_breakpoint(display.step_aside))
        progress.start_lines(cluster, engine)
        info = RunInfo(folder.experiment, folder.name, folder.path, folder.place, config.shown, attempt)
        progress.callbacks.call("on_run_start", info)
        if cluster.engine == "in_process" and streams_of(config.tree):
            in_use.enter_context(start_ray(cfg))
        sets = in_use.marked(_prepared(config, progress.display))
        progress.prepared_line(sets)
        job = Job(
            experiment=path_of(experiment),
            tree=config.tree,
            shown=config.shown,
            root=folder.root,
            name=folder.experiment,
            run=folder.name,
            attempt=attempt,
            project=Path.cwd(),
            engine=cluster.engine,
            preemptible=cluster.engine == "ray" and not cluster.embedded,
            verbose=Settings.read().verbose,
            reading=reading,
            prepared=sets,
            evaluate=config.checkpoint is not None,
        )
        ending = _train(engine, job, config, cluster.host, progress, control)
        if ending.stopped:
            raise Terminated
    result = Result(folder, ending.metrics, progress.best)
    progress.begin()
    record.finish("SUCCEEDED", metrics=ending.metrics)
    progress.end_lines(result)
    progress.callbacks.call("on_run_end", "SUCCEEDED", ending.metrics)
    return result


def _claimed(config: Config, cluster: Cluster, held: contextlib.ExitStack) -> tuple[registry.Record, int]:
    """The record of the run, new or taken over, and the number of this attempt at it.

    Args:
        config: of the run.
        cluster: that it trains on.
        held: gets to hold back Ctrl-C and SIGTERM from the moment when the record says that the run is alive.

    Raises:
        UsageError: another driver trains it.
    """
    cfg = config.cfg
    facts = registry.provenance(config.overrides)
    facts |= {"status": "RUNNING", "seed": cfg.seed, "start": registry.now(), "workers": cfg.start_workers}
    facts |= {"engine": {"asked": cfg.engine, "used": cluster.engine}}
    facts |= {"epochs": cfg.num_epochs, "monitor": cfg.monitor, "mode": cfg.mode}
    launched = Settings.read().job is not None
    if launched:  # who launched it has written these
        facts = {name: value for name, value in facts.items() if name not in ("command", "git")}
    if config.run is None:
        folder, before, attempt = config.claimed or claim_run(storage_root(cfg.storage_path), cfg.name), {}, 1
        if not folder.claim_attempt(attempt, registry.claim()):
            raise UsageError(f"another driver has begun {folder.title} at this very moment")
        if config.claimed:
            before = registry.refuse_living(folder)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.hold_reserve()
        if config.origin:
            facts["from"] = config.origin.title
    else:
        folder, attempt = config.run, registry.take_over(config.run)
        before = registry.recorded(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.withdraw_stop()
        folder.hold_reserve()
        if not launched:
            before = before.get(registry.REPLACED) or before
            facts |= {"attempts": registry.attempts(before), "job": None}
    before = {name: value for name, value in before.items() if name not in ("end", "error")}
    held.enter_context(held_signals())
    return registry.Record(folder, before, held=config.run is not None, **facts, attempt=attempt), attempt


def prepare(config: Config) -> None:
    """Prepare every dataset of an experiment that can be and is not.

    Raises:
        DatasetError: a dataset cannot be batched or prepared.
        StorageError: the store cannot be written.
    """
    _check_datasets(config)
    display = Display(sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        if streams_of(config.tree):
            stack.enter_context(start_ray(config.cfg))
        sets = _prepared(config, display)
    if sets:
        display.print(f"{len(sets)} prepared in {_root(config.cfg)}; runs use them by themselves")
    else:
        display.print("nothing was prepared")


def _root(cfg: Any) -> str:
    return prepared_root(cfg.storage_path, cfg.prepared_path)


def _prepared(config: Config, display: Display) -> dict[str, PreparedSet]:
    """The prepared sets to read instead of datasets, made before if `cfg.prepared` says so."""
    cfg = config.cfg
    if cfg.prepared == "never":
        return {}
    if cfg.prepared == "auto":
        found = _found(config, display.print)
    else:
        tree, left_out = _preparable(config.tree)
        for name in left_out:
            display.print(f"datasets.{name} is not prepared: Datasets makes another of it")
        root = _root(cfg)
        ways: dict[str, Any] = {"progress": display.preparing, "cluster": lambda: start_ray(cfg)}
        shown = config.shown.get("datasets", {})
        found = preparation.make(tree, root, shown=shown, seed=cfg.seed, project=Path.cwd(), tell=display.print, **ways)
        keep = [item.manifest.name for item in found.values()]
        limits = {"max_age_s": cfg.prepared_max_days * 86_400, "max_bytes": cfg.prepared_max_gb * 1e9}
        for removed in Store(root).clean(**limits, keep=keep):
            display.print(
                f"removed the prepared set {removed.name}, {removed.size_bytes / 1e6:,.1f} MB: not used lately"
            )
    return {name: dataclasses.replace(item, cache_bytes=cfg.prepared_max_gb * 1e9) for name, item in found.items()}


def _found(config: Config, tell: Callable[[str], None]) -> dict[str, PreparedSet]:
    """The prepared sets that fit the datasets."""
    tree, _ = _preparable(config.tree)
    shown = config.shown.get("datasets", {})
    return preparation.find(tree, _root(config.cfg), shown=shown, seed=config.cfg.seed, project=Path.cwd(), tell=tell)


def _preparable(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config with those datasets that can be prepared, and the names of the others."""
    if "datasets" not in tree:
        return dict(tree), []
    nodes = described(tree)
    kept = _kept_as_given(tree["datasets"], nodes)
    return dict(tree) | {"datasets": {name: nodes[name] for name in kept}}, [name for name in nodes if name not in kept]


def _kept_as_given(group_node: Any, nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The datasets that `Datasets` holds as conf.yaml describes them; its constructor may put others in their place."""
    try:
        with declaring():
            group = build(group_node, "datasets")
    except (ConfigError, TypeError):
        return []  # it reads them itself
    held = {name: getattr(group, name, None) for name in nodes}
    classes = {name: item.target if isinstance(item, Declaration) else type(item) for name, item in held.items()}
    return [name for name, node in nodes.items() if path_of(classes[name]) == node["_target_"]]


class _InUse(contextlib.ExitStack):
    """What a run holds while it lasts: marks on the prepared sets that it reads, so that nobody removes them."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[Callable[[], None]] = []

    def marked(self, sets: dict[str, PreparedSet]) -> dict[str, PreparedSet]:
        """The same sets without those that were removed in this instant."""
        held = {}
        for name, item in sets.items():
            store = Store(item.root)
            self._marks.append(self.enter_context(store.used(item.manifest.name)))
            if store.find(item.manifest.name):
                held[name] = item
        return held

    def refresh(self) -> None:
        for mark in self._marks:
            with contextlib.suppress(OSError):
                mark()


@contextlib.contextmanager
def _recorded_end(progress: "_Progress", control: Control) -> Iterator[None]:
    """Whatever ends a run early is written into its record."""
    record = progress.record
    run = f"{record.folder.experiment} {record.folder.name}"
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if control.lost:
            record.disown()
            raise MlxError(f"{run} was taken over by another driver; this one has ended") from None
        if record.held:
            record.withdraw()
        else:
            record.finish("STOPPED")
        progress.ended("STOPPED", interrupt)
        code = 143 if isinstance(interrupt, Terminated) else 130
        if not progress.config.kept:
            raise RunStopped("stopped; nothing of this run is kept", code) from None
        if record.held:
            raise RunStopped(f"stopped before {run} resumed; it is as it was", code) from None
        message = f"stopped; {run} is marked STOPPED, its checkpoints are kept. Go on: {_resume_command(progress)}"
        raise RunStopped(message, code) from None
    except BaseException as error:
        with contextlib.suppress(StorageError):  # the disk may be what failed
            if record.held:
                record.withdraw()
            else:
                record.finish("FAILED", error=redacted(message_of(error)))
        progress.ended("FAILED", error)
        if isinstance(error, MlxError) and record.held:
            error.cure = f"{run} has not been resumed; it is as it was."
        elif isinstance(error, WorkerLoopError | WorkerLostError | HangError) and _has_checkpoint(progress):
            error.cure = f"Again from the last checkpoint: {_resume_command(progress)}"
        raise
    finally:
        progress.display.close()


def _has_checkpoint(progress: "_Progress") -> bool:
    if not progress.config.kept:
        return False
    with contextlib.suppress(StorageError):
        return bool(checkpoints.Checkpoints(progress.record.folder.checkpoints).all())
    return False


def _resume_command(progress: "_Progress") -> str:
    folder, overrides = progress.record.folder, progress.config.overrides
    named = any(item.startswith("cfg.name=") for item in overrides)
    run = folder.place if _elsewhere(overrides) else folder.title if named else folder.name
    return shlex.join(["mlx", "train", "launch" if Settings.read().job else "run", f"--resume={run}"])


def _refuse_without_checkpoint(run: RunFolder) -> None:
    """A run that has saved checkpoints is not begun anew because they are gone.

    Raises:
        ConfigError: none is left.
    """
    latest = registry.recorded(run).get("latest")
    if latest and not checkpoints.Checkpoints(run.checkpoints).any():
        raise ConfigError(
            f"{run.title} has saved checkpoints, the last as {latest.get('path')}, and none is left in "
            f"{run.checkpoints}. Put one back, or start over in a new run: mlx train run --from {run.title}"
        )


def _check_datasets(config: Config) -> None:
    for name, node in config.tree.get("datasets", {}).items():
        target = object_at(node["_target_"]) if isinstance(node, dict) else None
        if isinstance(target, type):
            datasets.check(target, f"datasets.{name}")
    Reading.parsed(config.cfg.loader)


def _reading(config: Config, cluster: Cluster) -> Reading:
    """Who reads samples: `cfg.loader` on this cluster.

    Raises:
        ConfigError: there are no CPUs to spare for `ray`.
    """
    cfg = config.cfg
    if cfg.start_workers == 0:
        reading = Reading.parsed(cfg.loader, 1)
        return reading if reading.by == "processes" else Reading("worker")
    held = 1 if streams_of(config.tree) else 0  # Ray Data needs a CPU as well
    spare = (cluster.cpus - held) / cfg.start_workers - cfg.cpus_per_worker
    reading = Reading.parsed(cfg.loader, spare)
    if reading.by == "ray" and not 1 <= reading.count <= spare:
        raise ConfigError(
            f"cfg.loader={cfg.loader} reads on CPUs that no worker holds: the cluster has {cluster.cpus:g}, for "
            f"{cfg.start_workers} workers of {cfg.cpus_per_worker}. Lower cfg.start_workers, or use cfg.loader=auto"
        )
    return reading


@contextlib.contextmanager
def _settled(config: Config, cluster: Cluster) -> Iterator[Cluster]:
    """Where the run trains while the block runs: an embedded Ray where only that can read the datasets.

    Raises:
        ConfigError: `cfg.engine=local` asks for what it cannot do.
    """
    streams = _unprepared_streams(config) if cluster.engine == "local" else []
    if not streams:
        yield cluster
        return
    why = f"datasets.{streams[0]} is an unprepared stream of Ray Data"
    if config.cfg.engine == "local":
        raise ConfigError(
            f"cfg.engine=local cannot train this: {why}; run mlx train prepare first, or use cfg.engine=auto"
        )
    with on_ray(config.cfg, why) as found:
        yield found


def _unprepared_streams(config: Config) -> list[str]:
    streams = streams_of(config.tree)
    prepared = _found(config, lambda text: None) if streams and config.cfg.prepared != "never" else {}
    return [name for name in streams if name not in prepared]


def _engine(config: Config, cluster: Cluster) -> Engine:
    """The engine of a run. Makes the fork server, so it comes before anything that starts threads."""
    cfg = config.cfg
    timeout_s = max(1800.0, 2 * cfg.hang_timeout_s)  # of collectives: deadlock detection comes first
    if cluster.engine != "local":
        local.cool_down()
    if cluster.engine == "in_process":
        from mlx_runtime.engines.in_process import InProcess

        return InProcess(use_gpu=cluster.use_gpu)
    if cluster.engine == "local":
        return local.Local(
            cfg.start_workers,
            use_gpu=cluster.use_gpu,
            cpus_per_worker=cfg.cpus_per_worker,
            max_failures=cfg.max_failures,
            timeout_s=timeout_s,
        )
    from mlx_runtime.engines.on_ray import OnRay

    return OnRay(cfg, cluster, timeout_s=timeout_s)


def _train(engine: Engine, job: Job, config: Config, host: str, progress: "_Progress", control: Control) -> Ending:
    """Train, drawing what the workers report until they are done."""
    receiver = Receiver(host)
    job = dataclasses.replace(job, address=receiver.address, key=receiver.key)
    hangs = _Hangs(receiver)
    told = False
    group = None
    started = time.monotonic()
    patient = True
    control.gentle()
    try:
        group = engine.start(job, progress.handle, control.stop_asked)
        while group.poll():
            for event in receiver.events(timeout_s=0.1):
                progress.handle(event)
                hangs.handle(event)
                told = told and event["kind"] != "hello"  # a new worker has not heard it yet
            if patient and not progress.world_size and time.monotonic() - started > PHASE_S:
                progress.display.print("starting  workers")
                patient = False
            control.check()
            if control.stop_asked() and not told:
                receiver.tell(STOP)
                told = True
            hangs.judge(progress.world_size, min(ANSWER_S, config.cfg.hang_timeout_s / 2))
        for event in receiver.drain():
            progress.handle(event)
    except MlxError:  # what workers reported before they failed belongs into the record
        for event in receiver.events(timeout_s=0.1):
            progress.handle(event)
        raise
    finally:
        if group is not None:
            group.close()
        receiver.close()
    return Ending(progress.metrics, progress.stopped)


class _Hangs:
    """Asks all workers where they stand when one has taken no step for long, and judges by their answers."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._answers: dict[int, Event] = {}
        self._until = math.inf
        self._seconds = 0.0

    def handle(self, event: Event) -> None:
        if event["kind"] == "hang" and self._until == math.inf:
            self._answers = {}
            self._until = time.monotonic() + ANSWER_S
            self._seconds = event["seconds"]
            self._receiver.tell(WHERE)
        elif event["kind"] == "where":
            self._answers[event["rank"]] = event

    def judge(self, world_size: int, least_s: float) -> None:
        """Once all have answered, or had the time for it.

        Args:
            world_size: of the present group.
            least_s: a worker that took a step so recently is at work.

        Raises:
            HangError: they wait for each other.
        """
        if self._until == math.inf or (len(self._answers) < world_size and time.monotonic() < self._until):
            return
        self._until = math.inf
        text = verdict(self._answers, world_size, least_s)
        if text is not None:
            raise HangError(
                f"the workers have taken no step for {self._seconds:.0f} s:\n  {text}\n"
                "If they need so long, raise cfg.hang_timeout_s"
            )


def _board_command(folder: RunFolder, overrides: tuple[str, ...]) -> str:
    """What to type to see this run: the short form where it works, else one that works from any folder."""
    words = [folder.place] if _elsewhere(overrides) else [folder.experiment, folder.name]
    if Settings.read().job or (shutil.which("mlx") and len(words) > 1):
        return shlex.join(["mlx", "xp", "board", *words])
    return shlex.join([str(Path(sys.executable).with_name("mlx")), "xp", "board", folder.place])


def _elsewhere(overrides: tuple[str, ...]) -> bool:
    """Whether a run is in another storage than conf.yaml names, so that only its path tells which one it is."""
    settings = Settings.read()
    return bool(settings.job or settings.storage) or any(item.startswith("cfg.storage_path") for item in overrides)


@dataclass
class _Progress:
    """The driver's view of a run: draws events, and keeps what the record and the end lines need."""

    record: registry.Record
    display: Display
    config: Config
    callbacks: Listeners
    begun: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    logged: list[str] = field(default_factory=list)
    world_size: int = 0
    best: dict[str, Any] | None = None
    datasets: dict[str, dict[str, int]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.best = self.record["best"]

    def handle(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "facts":
            self._facts_line(event)
        elif kind == "loader":
            self._loader_line(event)
        elif kind == "checkpoint":
            self._checkpoint(event)
            names = ("path", "epoch", "finished", "step", "metrics")
            self.callbacks.call("on_checkpoint", {name: event[name] for name in names})
        elif kind == "report":
            self.callbacks.call("on_report", Report(*(event[name] for name in ("step", "epoch", "values", "facts"))))
        elif kind == "began":
            self.begin()
        elif kind == "end":
            self.metrics, self.stopped, self.logged = event["metrics"], event["stopped"], event["logged"]
        elif kind == "lost":
            self._lost(event)
        elif kind == "output":
            self.display.output(event["text"], to_stderr=event["to_stderr"])
        else:
            if kind == "epoch":
                self.record.note(epoch=event["epoch"], metrics=(self.record["metrics"] or {}) | event["values"])
            self.display.handle(event)
            if kind == "epoch":
                self.callbacks.call("on_epoch_end", event["epoch"], event["values"])

    def begin(self) -> None:
        """Every worker has restored what there is to restore: from here on the record is that of this attempt."""
        if not self.begun:
            self.begun = True
            self.record.begin(self.config.yaml())
            if self.config.kept:
                snapshots.store(Path.cwd(), self.record.folder)

    def ended(self, status: str, error: BaseException) -> None:
        """The run has ended early."""
        self.callbacks.call("on_exception", error)
        self.callbacks.call("on_run_end", status, self.metrics or self.record["metrics"] or {})

    def start_lines(self, cluster: Cluster, engine: Engine) -> None:
        folder, cfg = self.record.folder, self.config.cfg
        if self.config.checkpoint is not None:
            assert self.config.origin is not None
            self.display.print(f"evaluate  {self.config.origin.title}, {self.config.checkpoint}")
        elif self.config.fast:
            look = f"a quick look: {cfg.limit_batches or 'all'} batches of each pass, nothing is kept"
            self.display.print(f"run       {folder.experiment}, {look}")
        else:
            self.display.print(f"run       {folder.experiment} {folder.name}")
            self.display.print(f"folder    {folder.place}", always=True)
        if self.config.run is not None:
            self._override_lines()
        workers = f"{cfg.start_workers} DDP worker{'s' * (cfg.start_workers != 1)}"
        why = {"local": "local engine", "ray": cluster.why, "in_process": "in-process engine"}.get(cluster.engine)
        text = f"{workers} {cluster.title}" if cfg.start_workers else cluster.title
        self.display.print(f"workers   {text}{f' ({why})' if why else ''}")
        if engine.notice:
            self.display.print(f"          {engine.notice}")
        if (written := list(secret_keys(self.config.unresolved))) and not self.config.fast:
            self.display.print(f"note      conf.yaml of the run holds {', '.join(written)} as written")
            self.display.print("          to keep a secret out of it: ${oc.env:NAME}, a variable of the environment")
        if cfg.use_gpu is None and cluster.gpus and not cluster.use_gpu:
            found = f"{cluster.gpus:g} GPU{'s' * (cluster.gpus != 1)} for {cfg.start_workers} workers"
            cure = f"cfg.start_workers={int(cluster.gpus)} trains on GPUs; cfg.use_gpu=false chooses CPUs"
            self.display.print(f"warning   training on CPUs, with {found}. {cure}", always=True)
        cores = os.cpu_count() or 1
        here = cluster.engine == "local" or cluster.embedded
        if here and cfg.start_workers * cfg.cpus_per_worker > cores:
            self.display.print(f"          more workers than the {cores} cores here: they share them")

    def _override_lines(self) -> None:
        """What differs from the run as it was, and which overrides change nothing."""
        for change in self.config.changes:
            how = "" if change.key.startswith("cfg.") else ", set once its state is restored"
            self.display.print(f"changed   {change}{how}")
        keys = [change.key for change in self.config.changes]
        for item in self.config.overrides:
            key = item.lstrip("+~").partition("=")[0]
            if not any(f"{changed}.".startswith(f"{key}.") for changed in keys):
                self.display.print(f"unchanged {redacted_override(item)}")

    def prepared_line(self, sets: Mapping[str, PreparedSet]) -> None:
        if sets:
            made = max(item.manifest.created for item in sets.values())
            where = next(iter(sets.values())).root
            self.display.print(f"prepared  {', '.join(sets)}: read from {where} (made {made[:10]})")
            self.record.update(prepared={name: item.manifest.name for name, item in sets.items()})

    def end_lines(self, result: Result) -> None:
        folder = result.folder
        every = self.config.checkpoint is not None
        names = [name for name in result.metrics if every or name.startswith("test") or name in self.logged]
        rows = [(name, f"{result.metrics[name]:.4f}") for name in sorted(names)]
        if result.best and self.config.kept:
            where = f"epoch {result.best['epoch'] + 1}, {result.best['path'].removeprefix(folder.place + '/')}"
            rows.append((f"best {self.config.cfg.monitor}", f"{result.best['value']:.4f} ({where})"))
        rows.append(("took", f"{time.monotonic() - self.started:.1f} s"))
        if self.config.checkpoint is not None:
            rows.append(("recorded", _record_evaluation(self.config, result.metrics)))
        elif self.config.fast:
            rows.append(("run", "all code ran; nothing of this run is kept"))
        else:
            rows += [("run", folder.place), ("TensorBoard", _board_command(folder, self.config.overrides))]
        width = max(len(name) for name, _ in rows) + 2
        self.display.print(always=True)
        for name, value in rows:
            self.display.print(f"{name:<{width}}{value}", always=True)

    def _facts_line(self, event: Event) -> None:
        before, self.world_size = self.world_size, event["world_size"]
        if before:
            now = f"{before} → {self.world_size}" if before != self.world_size else str(before)
            self.display.print(f"workers   {now}: started again")
            self.record.update(workers=self.world_size)
            return
        threads = self.config.cfg.cpus_per_worker
        per_worker = f"{threads} thread{'s' * (threads != 1)} per worker"
        precision = "fp32" if self.config.cfg.precision == 32 else self.config.cfg.precision
        self.display.print(
            f"device    {event['device']}, {precision}, {per_worker}, {event['parameters']:,} parameters"
        )
        self.record.update(device=event["device"], parameters=event["parameters"])

    def _loader_line(self, event: Event) -> None:
        size = {name: event[name] for name in ("rows", "steps", "global_batch")}
        if event["training"]:
            text = "{rows:,} rows in {steps:,} steps, global batch {global_batch:,}".format(**size)
            self.display.print(f"{event['name']:<9} {text}")
        self.datasets[event["name"]] = size
        self.record.update(datasets=self.datasets)

    def _lost(self, event: Event) -> None:
        ranks = ", ".join(str(rank) for rank in event["ranks"])
        self.display.print(f"lost      rank {ranks}: {event['why']:.200}")
        self.record.update(failures=(self.record["failures"] or 0) + 1)

    def _checkpoint(self, event: Event) -> None:
        cfg = self.config.cfg
        entry = {"epoch": event["epoch"], "path": event["path"], "value": event["metrics"].get(cfg.monitor)}
        if not event["finished"]:
            self.record.update(latest=entry | {"step": event["step"]})
            return
        value, best = entry["value"], self.best["value"] if self.best else None
        # Of equals the later is best, as pruning has it. A value of NaN never is.
        better = best is None or (value is not None and (value >= best if cfg.mode == "max" else value <= best))
        if value is not None and not math.isnan(value) and better:
            self.best = entry
        self.record.update(metrics=event["metrics"], latest=entry, best=self.best)
