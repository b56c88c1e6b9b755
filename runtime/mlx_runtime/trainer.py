"""Train one experiment: make the run folder, start the workers, show what they say, write down how it ended."""

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from mlx_runtime import checkpoints, datasets, preparation, registry
from mlx_runtime.cluster import Cluster, start_ray
from mlx_runtime.datasets import DatasetShard, DatasetShards, Reading
from mlx_runtime.declarations import Declaration, declaring, made_when_read
from mlx_runtime.errors import ConfigError, MlxError, RunStopped, StorageError, WorkerLoopError, first_line
from mlx_runtime.experiment import BaseModule, WorkerRun
from mlx_runtime.layout import RunFolder, claim_run, prepared_root, storage_folder, write_atomic
from mlx_runtime.loading import Config, build, build_optimizers
from mlx_runtime.parallel import Worker, quiet_ray_train, seed_everything, seeded, shared
from mlx_runtime.prepared import PreparedSet, Store
from mlx_runtime.progress import Direct, Display, Event, Receiver, Remote, Sink
from mlx_runtime.settings import Settings
from mlx_runtime.signatures import object_at, path_of
from mlx_runtime.streaming import Dealer, DealtReader, RemoteReaders, start_dealer
from mlx_runtime.tracking import Tracker


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


@dataclass(frozen=True)
class Job:
    """What a worker needs to take part in a run; travels to it pickled, so everything in it is plain."""

    experiment: str
    tree: dict[str, Any]
    run: Path
    project: Path
    local: bool
    verbose: bool
    reading: Reading
    prepared: dict[str, PreparedSet]
    address: tuple[str, int] | None = None
    key: bytes = b""


def fit(experiment: type[BaseModule], config: Config, cluster: Cluster) -> Result:
    """Train an experiment as a new run.

    Args:
        experiment: its class, importable by name.
        config: checked, from `load_config`.
        cluster: from `connect`.

    Raises:
        DatasetError: a dataset that cannot be batched; nothing was started.
        StorageError: the run folder cannot be written.
        WorkerLoopError: user code raised.
        RunStopped: Ctrl-C or SIGTERM; the run is marked STOPPED.
    """
    _check_datasets(config)
    cfg = config.cfg
    if cfg.restore_checkpoint_path:
        checkpoints.read(Path(cfg.restore_checkpoint_path))
    reading = _reading(config, cluster)
    folder = claim_run(storage_folder(cfg.storage_path), cfg.name)
    progress = _Progress(registry.Record(folder), Display(sys.stdout), config)
    in_use = _InUse()
    with _recorded_end(progress), _sigterm_as_interrupt(), in_use, progress.record.alive(in_use.refresh):
        write_atomic(folder.conf, config.yaml())
        facts = registry.provenance(config.overrides)
        progress.record.update(
            status="RUNNING", **facts, seed=cfg.seed, start=registry.now(), workers=cfg.start_workers
        )
        progress.start_lines(cluster)
        local = cfg.start_workers == 0
        if local and _streams(config.tree):
            in_use.enter_context(start_ray(cfg))
        sets = in_use.marked(_prepared(config, progress.display))
        progress.prepared_line(sets)
        place = (folder.path, Path.cwd(), local, Settings.read().verbose)
        job = Job(path_of(experiment), config.tree, *place, reading, sets)
        metrics = _fit_here(job, progress) if job.local else _fit_on_workers(job, config, cluster, progress)
    result = Result(folder, metrics, progress.best)
    progress.record.finish("SUCCEEDED", metrics=metrics)
    progress.end_lines(result)
    return result


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
        if _streams(config.tree):
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
    root = _root(cfg)
    options: dict[str, Any] = {"seed": cfg.seed, "project": Path.cwd(), "tell": display.print}
    if cfg.prepared == "never":
        return {}
    tree = dict(config.tree)
    if "datasets" in tree:
        nodes = _described(tree)
        kept = _kept_as_given(tree["datasets"], nodes)
        for name in [name for name in nodes if name not in kept and cfg.prepared == "make"]:
            display.print(f"datasets.{name} is not prepared: Datasets makes another of it")
        tree["datasets"] = {name: nodes[name] for name in kept}
    if cfg.prepared == "auto":
        found = preparation.find(tree, root, **options)
    else:
        ways: dict[str, Any] = {"progress": display.preparing, "cluster": lambda: start_ray(cfg)}
        found = preparation.make(tree, root, **options, **ways)
        keep = [item.manifest.name for item in found.values()]
        limits = {"max_age_s": cfg.prepared_max_days * 86_400, "max_bytes": cfg.prepared_max_gb * 1e9}
        for removed in Store(root).clean(**limits, keep=keep):
            display.print(
                f"removed the prepared set {removed.name}, {removed.size_bytes / 1e6:,.1f} MB: not used lately"
            )
    return {name: dataclasses.replace(item, cache_bytes=cfg.prepared_max_gb * 1e9) for name, item in found.items()}


def _described(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The nodes of the datasets that conf.yaml describes, by name."""
    nodes = tree.get("datasets", {}).items()
    return {name: node for name, node in nodes if isinstance(node, dict) and "_target_" in node}


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
def _recorded_end(progress: "_Progress") -> Iterator[None]:
    """Whatever ends a run early is written into its record."""
    record = progress.record
    try:
        yield
    except KeyboardInterrupt as interrupt:
        record.finish("STOPPED")
        run = f"{record.folder.experiment} {record.folder.name}"
        message = f"stopped; {run} is marked STOPPED, its checkpoints are kept"
        raise RunStopped(message, 143 if isinstance(interrupt, _Terminated) else 130) from None
    except BaseException as error:
        with contextlib.suppress(StorageError):  # the disk may be what failed
            record.finish("FAILED", error=str(error))
        raise
    finally:
        progress.display.close()


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
    held = 1 if _streams(config.tree) else 0  # Ray Data needs a CPU as well
    spare = (cluster.cpus - held) / cfg.start_workers - cfg.cpus_per_worker
    reading = Reading.parsed(cfg.loader, spare)
    if reading.by == "ray" and not 1 <= reading.count <= spare:
        raise ConfigError(
            f"cfg.loader={cfg.loader} reads on CPUs that no worker holds: the cluster has {cluster.cpus:g}, for "
            f"{cfg.start_workers} workers of {cfg.cpus_per_worker}. Lower cfg.start_workers, or use cfg.loader=auto"
        )
    return reading


def _streams(tree: Mapping[str, Any]) -> list[str]:
    """Names of the datasets that are streams of Ray Data."""
    return [name for name, node in _described(tree).items() if hasattr(object_at(node["_target_"]), "to_ray")]


def _fit_here(job: Job, progress: "_Progress") -> dict[str, float]:
    """Train inside this process."""
    if not job.verbose:
        quiet_ray_train()
    if progress.config.cfg.use_gpu is False:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray's local mode takes what torch sees
    trainer = ray.train.torch.TorchTrainer(
        lambda: progress.finish(_work(job, Direct(progress.handle))),
        scaling_config=ray.train.ScalingConfig(num_workers=0),
    )
    trainer.fit()
    return progress.metrics


def _fit_on_workers(job: Job, config: Config, cluster: Cluster, progress: "_Progress") -> dict[str, float]:
    """Train on Ray workers, drawing what rank 0 sends until they are done."""
    cfg = config.cfg
    receiver = Receiver(cluster.host)
    use_gpu = cluster.gpus >= cfg.start_workers if cfg.use_gpu is None else cfg.use_gpu
    resources = {"CPU": float(cfg.cpus_per_worker)} | ({"GPU": 1.0} if use_gpu else {})
    scored = {"checkpoint_score_attribute": cfg.monitor, "checkpoint_score_order": cfg.mode} if cfg.monitor else {}
    trainer = ray.train.torch.TorchTrainer(
        _train,
        train_loop_config={"job": Job(**{**vars(job), "address": receiver.address, "key": receiver.key})},
        scaling_config=ray.train.ScalingConfig(
            num_workers=cfg.start_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name="checkpoints",
            storage_path=str(job.run),
            logging_config=ray.train.LoggingConfig("INFO" if job.verbose else "ERROR"),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=cfg.keep_checkpoints, **scored),
        ),
    )
    outcome = _Outcome()
    thread = threading.Thread(target=outcome.of, args=(trainer,), name="fit", daemon=True)
    thread.start()  # not the main thread: there Ray would take over Ctrl-C
    try:
        while thread.is_alive():
            for event in receiver.events(timeout_s=0.1):
                progress.handle(event)
        for event in receiver.drain():
            progress.handle(event)
    finally:
        receiver.close()
    if outcome.error is not None:
        raise _told(outcome.error) from outcome.error
    return progress.metrics


class _Outcome:
    """How `fit` ended, seen from another thread."""

    error: BaseException | None = None

    def of(self, trainer: ray.train.torch.TorchTrainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:
            self.error = error


def _told(error: BaseException) -> MlxError:
    """The first thing that went wrong on a worker, as an error of ours."""
    failures = getattr(error, "worker_failures", {})
    causes = [_cause(failure) for _, failure in sorted(failures.items())]
    for cause in causes:
        if isinstance(cause, MlxError):
            return cause
        if isinstance(cause, OSError):  # Ray Train copies checkpoints to the storage by itself
            return StorageError(f"cannot write a checkpoint of the run: {cause}")
    if causes:
        return MlxError(f"a worker was lost: {first_line(causes[0])}")
    return MlxError(f"Ray Train failed: {first_line(error)}")


def _cause(failure: Any) -> BaseException:
    """What user code raised, inside Ray's wrappers."""
    for name in ("_base_exc", "cause", "__cause__"):
        inner = getattr(failure, name, None)
        if isinstance(inner, BaseException):
            return _cause(inner)
    return failure  # type: ignore[no-any-return]


def _train(config: Mapping[str, Any]) -> None:
    """The training function: what Ray Train runs on every worker."""
    job: Job = config["job"]
    sink: Sink | None = None
    if ray.train.get_context().get_world_rank() == 0:
        assert job.address is not None
        sink = Remote(job.address, job.key)
    metrics = _work(job, sink)
    if sink is not None:
        sink.send({"kind": "end", "metrics": metrics})


def _work(job: Job, sink: Sink | None) -> dict[str, float]:
    """Build the experiment on this worker and run its loop. Returns the latest value of every number."""
    if str(job.project) not in sys.path and job.project.is_dir():
        sys.path.insert(0, str(job.project))
    if not job.verbose:
        quiet_ray_train()
    worker = Worker.current()
    with _user_errors(worker.rank, job.project):
        cls = object_at(job.experiment)
        groups = _build_groups(job.tree, worker)
        experiment: BaseModule = cls(**groups)
    cfg = groups["cfg"]
    torch.set_num_threads(cfg.cpus_per_worker)
    folder = RunFolder(job.run)
    with contextlib.ExitStack() as stack:
        tracker = stack.enter_context(Tracker(folder.path, folder.metrics)) if worker.writes else None
        experiment._begin(WorkerRun(folder, worker, job.local, job.tree, sink if worker.writes else None, tracker))
        if sink is not None and worker.writes:
            sink.send(_facts(groups, worker))
        seed_everything(cfg.seed + worker.rank)  # models began alike; dropout and the like must differ by rank
        with _user_errors(worker.rank, job.project):
            shards = _shards(groups, job, worker)
            for shard in shards:
                if shard.dealt is not None:
                    stack.callback(shard.dealt.close)
            experiment.worker_loop(shards)
        if any(shard.dealt for shard in shards):
            with contextlib.suppress(RuntimeError):  # another worker failed, and tells why
                shared(None)  # nobody leaves before all are done: the first worker owns what deals streams
        return experiment._end()


def _build_groups(tree: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
    """All groups as live objects; the optimizers last, over models that are on the device already."""
    groups: dict[str, Any] = {"cfg": build(tree["cfg"], "cfg")}
    seed = groups["cfg"].seed
    seed_everything(seed)
    for name, node in tree.items():
        if name == "datasets":
            groups[name] = _build_datasets(node, seed)
        elif name not in ("cfg", "optimizers"):
            groups[name] = build(node, name)
    for member in checkpoints.members(groups.get("models")).values():
        if isinstance(member, torch.nn.Module):
            member.to(worker.device)
    if "optimizers" in tree:
        groups["optimizers"] = build_optimizers(tree["optimizers"], groups.get("models"))
    return groups


def _build_datasets(node: Any, seed: int) -> Any:
    """The group `datasets`, each made when it is first read, unless its constructor wants to read them itself.

    Made under a seed of their own, so that a random dataset is the same on every rank, whenever it is made.
    """
    try:
        with declaring():
            return made_when_read(build(node, "datasets"), lambda: seeded(seed))
    except (ConfigError, TypeError):
        return build(node, "datasets")


def _shards(groups: Mapping[str, Any], job: Job, worker: Worker) -> DatasetShards:
    """One shard per argument of `Datasets`, in order."""
    cfg = groups["cfg"]
    nodes = {name: node for name, node in job.tree.get("datasets", {}).items() if not name.startswith("_")}
    streams = [name for name in _streams(job.tree) if name not in job.prepared]
    dealers = {}
    if streams and job.local:
        dealers = {name: Dealer(nodes[name], name, cfg.seed, job.project) for name in streams}
    elif streams:
        place = (cfg.seed, job.project, worker.world_size)
        first = worker.rank == 0
        dealers = shared({name: start_dealer(nodes[name], name, *place) for name in streams} if first else None)
    dealt = {name: DealtReader(dealer, name) for name, dealer in dealers.items()}
    ahead = {"processes": job.reading.count, "prefetch_batches": cfg.prefetch_batches}
    remote = RemoteReaders(nodes, cfg.seed, job.project, **ahead) if job.reading.by == "ray" else None
    return DatasetShards(
        {
            name: DatasetShard(
                name,
                groups["datasets"],
                worker,
                cfg.seed,
                reading=job.reading,
                prefetch_batches=cfg.prefetch_batches,
                prepared=job.prepared.get(name),
                dealt=dealt.get(name),
                remote=remote,
            )
            for name in nodes
        }
    )


def _facts(groups: Mapping[str, Any], worker: Worker) -> Event:
    """What only a worker knows and the start lines tell."""
    models = [item for item in checkpoints.members(groups.get("models")).values() if isinstance(item, torch.nn.Module)]
    return {
        "kind": "facts",
        "device": str(worker.device) if worker.device.type == "cpu" else torch.cuda.get_device_name(worker.device),
        "parameters": sum(item.numel() for model in models for item in model.parameters()),
    }


@contextlib.contextmanager
def _user_errors(rank: int, project: Path) -> Iterator[None]:
    """Turn what user code raises into one error with the user's frames and the rank."""
    try:
        yield
    except MlxError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if _is_users(frame.filename, project)]
        if frames[-1] not in theirs:
            theirs.append(frames[-1])  # where a library gave up
        lines = [
            f"  {_shown(frame.filename, project)}:{frame.lineno} in {frame.name}\n    {frame.line}" for frame in theirs
        ]
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        summary = f"{type(error).__name__}: {error}{notes}"
        raise WorkerLoopError(rank, summary, "\n".join(lines)) from None


def _board_command(folder: RunFolder, overrides: tuple[str, ...]) -> str:
    """What to type to see this run: the short form where it works, else one that works from any folder."""
    elsewhere = Settings.read().storage or any(item.startswith("cfg.storage_path") for item in overrides)
    if shutil.which("mlx") and not elsewhere:
        return shlex.join(["mlx", "xp", "board", folder.experiment, folder.name])
    return shlex.join([str(Path(sys.executable).with_name("mlx")), "xp", "board", str(folder.path)])


def _shown(file: str, project: Path) -> str:
    """A file of the user's relative to the project, which is what editors open."""
    return os.path.relpath(file, project) if _is_users(file, project) else file


def _is_users(file: str, project: Path) -> bool:
    return Path(file).is_relative_to(project) and "site-packages" not in file  # .venv is inside the project


@dataclass
class _Progress:
    """The driver's view of a run: draws events, and keeps what the record and the end lines need."""

    record: registry.Record
    display: Display
    config: Config
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    datasets: dict[str, dict[str, int]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def handle(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "facts":
            self._facts_line(event)
        elif kind == "loader":
            self._loader_line(event)
        elif kind == "checkpoint":
            self._checkpoint(event)
        elif kind == "end":
            self.finish(event["metrics"])
        else:
            self.display.handle(event)

    def finish(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def start_lines(self, cluster: Cluster) -> None:
        folder, cfg = self.record.folder, self.config.cfg
        self.display.print(f"run       {folder.experiment} {folder.name}")
        self.display.print(f"folder    {folder.path}")
        workers = f"{cfg.start_workers} DDP worker{'s' * (cfg.start_workers != 1)}"
        self.display.print(f"workers   {f'{workers} in {cluster.title}' if cfg.start_workers else cluster.title}")
        if cfg.use_gpu is None and 0 < cluster.gpus < cfg.start_workers:
            hint = f"cfg.start_workers={cluster.gpus:g} would use {'it' if cluster.gpus == 1 else 'them'}"
            self.display.print(f"          on CPUs: {cluster.gpus:g} GPU for {cfg.start_workers} workers; {hint}")
        cores = os.cpu_count() or 1
        if cluster.embedded and cfg.start_workers * cfg.cpus_per_worker > cores:
            self.display.print(f"          more workers than the {cores} cores here: they share them")

    def prepared_line(self, sets: Mapping[str, PreparedSet]) -> None:
        if sets:
            made = max(item.manifest.created for item in sets.values())
            where = next(iter(sets.values())).root
            self.display.print(f"prepared  {', '.join(sets)}: read from {where} (made {made[:10]})")
            self.record.update(prepared={name: item.manifest.name for name, item in sets.items()})

    def end_lines(self, result: Result) -> None:
        folder = result.folder
        rows = [(name, f"{value:.4f}") for name, value in sorted(result.metrics.items()) if name.startswith("test")]
        if result.best:
            where = f"epoch {result.best['epoch'] + 1}, {Path(result.best['path']).relative_to(folder.path)}"
            rows.append((f"best {self.config.cfg.monitor}", f"{result.best['value']:.4f} ({where})"))
        rows += [
            ("took", f"{time.monotonic() - self.started:.1f} s"),
            ("run", str(folder.path)),
            ("TensorBoard", _board_command(folder, self.config.overrides)),
        ]
        width = max(len(name) for name, _ in rows) + 2
        self.display.print()
        for name, value in rows:
            self.display.print(f"{name:<{width}}{value}")

    def _facts_line(self, event: Event) -> None:
        threads = self.config.cfg.cpus_per_worker
        per_worker = f"{threads} thread{'s' * (threads != 1)} per worker"
        self.display.print(f"device    {event['device']}, {per_worker}, {event['parameters']:,} parameters")
        self.record.update(device=event["device"], parameters=event["parameters"])

    def _loader_line(self, event: Event) -> None:
        size = {name: event[name] for name in ("rows", "steps", "global_batch")}
        if event["training"]:
            text = "{rows:,} rows in {steps:,} steps, global batch {global_batch:,}".format(**size)
            self.display.print(f"{event['name']:<9} {text}")
        self.datasets[event["name"]] = size
        self.record.update(datasets=self.datasets)

    def _checkpoint(self, event: Event) -> None:
        cfg = self.config.cfg
        entry = {"epoch": event["epoch"], "path": event["path"], "value": event["metrics"].get(cfg.monitor)}
        value, best = entry["value"], self.best["value"] if self.best else None
        # Of equals the later is best, since Ray Train lets go of the earlier. A value of NaN never is.
        better = best is None or (value is not None and (value >= best if cfg.mode == "max" else value <= best))
        if value is not None and not math.isnan(value) and better:
            self.best = entry
        self.record.update(metrics=event["metrics"], latest=entry, best=self.best)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
