"""What every worker of a run does: build the experiment, run its loop, and tell how that ended."""

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import ray.util
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mlx_runtime import checkpoints
from mlx_runtime.callbacks import Listeners, RunInfo
from mlx_runtime.config import EngineName, TrainConfig
from mlx_runtime.datasets import DatasetShard, DatasetShards, Loader, Reading
from mlx_runtime.declarations import declaring, made_when_read
from mlx_runtime.errors import (
    RAISED_BY_USERS,
    ConfigError,
    MlxError,
    StorageError,
    WorkerLoopError,
    WorkerLostError,
    first_line,
    is_users,
    message_of,
    user_frames,
)
from mlx_runtime.experiment import BaseModule, LoopStopped, WorkerRun
from mlx_runtime.layout import RunFolder, run_folder
from mlx_runtime.loading import build, build_cfg, build_optimizers
from mlx_runtime.logs import Log
from mlx_runtime.parallel import Worker, lost_peer, seed_everything, seeded, shared
from mlx_runtime.prepared import PreparedSet
from mlx_runtime.profiling import Profile
from mlx_runtime.progress import Event, Remote, Sink, at_breakpoint
from mlx_runtime.ray_private import quiet_ray_train
from mlx_runtime.signatures import object_at
from mlx_runtime.streaming import Dealer, DealtReader, RemoteReaders, start_dealer
from mlx_runtime.tracking import Tracking
from mlx_runtime.watching import Watch


@dataclass(frozen=True)
class Job:
    """What a worker needs to take part in a run; travels to it pickled, so everything in it is plain.

    Attributes:
        experiment: path of its class.
        tree: conf.yaml of the run, resolved.
        shown: the same without secrets.
        root, name, run: storage, experiment and run.
        attempt: number of the driver; a run that was taken over by another one has a higher number.
        project: folder of the experiment.
        engine: that starts the workers.
        preemptible: the cluster may give notice that a node goes away.
        verbose: let Ray print.
        reading: who reads samples.
        prepared: sets to read instead of datasets.
        address, key: of the driver's `Receiver`.
        evaluate: run `eval_loop` instead of `worker_loop`.
    """

    experiment: str
    tree: dict[str, Any]
    shown: dict[str, Any]
    root: str
    name: str
    run: str
    attempt: int
    project: Path
    engine: EngineName
    preemptible: bool
    verbose: bool
    reading: Reading
    prepared: dict[str, PreparedSet]
    address: tuple[str, int] | None = None
    key: bytes = b""
    evaluate: bool = False

    @property
    def folder(self) -> RunFolder:
        """Of the run, as this machine sees it."""
        return run_folder(self.root, self.name, self.run)


@dataclass(frozen=True)
class Ending:
    """How the loop of a worker ended.

    Attributes:
        metrics: the latest value of every recorded number.
        stopped: whether it was asked to, before the end.
        logged: names of the numbers that came from `self.log`.
    """

    metrics: dict[str, float]
    stopped: bool
    logged: frozenset[str] = frozenset()


def train(config: Mapping[str, Any]) -> None:
    """The training function of every worker that is a process of its own."""
    job: Job = pickle.loads(config["job"])
    assert job.address is not None
    train_to(Remote(job.address, job.key, ray.train.get_context().get_world_rank()), job)


def train_to(sink: Sink, job: Job) -> None:
    """Train, and report the end to the driver."""
    ending = work(job, sink)
    if ray.train.get_context().get_world_rank() == 0:
        logged = sorted(ending.logged)
        sink.send({"kind": "end", "metrics": ending.metrics, "stopped": ending.stopped, "logged": logged})


def work(job: Job, sink: Sink) -> Ending:
    """Build the experiment on this worker and run its loop."""
    if not job.project.is_dir():  # on another machine Ray has put the files somewhere else
        job = replace(job, project=Path.cwd())
    if str(job.project) not in sys.path:
        sys.path.insert(0, str(job.project))
    if not job.verbose:
        quiet_ray_train()
    worker = Worker.current()
    with contextlib.ExitStack() as stack:
        if job.engine == "ray":  # the local engine has the pipes of its workers
            stack.enter_context(Log(job.folder, worker.rank))
        if isinstance(sink, Remote):
            stack.enter_context(at_breakpoint(_DebuggerRefused(sink)))
        with _user_errors(worker.rank, job.project):
            groups, experiment = _built(job, worker, stack)
        cfg: TrainConfig = groups["cfg"]
        torch.set_num_threads(cfg.cpus_per_worker)
        run = _run_of(job, worker, cfg, sink, stack)
        if cfg.profile and worker.writes:
            tell = partial(run.send, "notice")
            run.step_done = stack.enter_context(Profile(job.folder, worker.device, lambda text: tell(text=text))).step
        if isinstance(sink, Remote):
            place = partial(_standing, run)
            watch = Watch(cfg.hang_timeout_s, lambda event: sink.send({"kind": "hang", **event}), place, job.project)
            stack.callback(watch.close)
            sink.where, run.beat = watch.stands, watch.beat
        hook = register_optimizer_step_post_hook(lambda *_: experiment._updated())
        stack.callback(hook.remove)
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: experiment._updating(optimizer))
        stack.callback(hook.remove)
        stack.callback(experiment._settle)  # a checkpoint under way is stored, whatever happens next
        with _user_errors(worker.rank, job.project):
            if worker.writes:
                sink.send(_facts(groups, worker))
            experiment._begin(run)
            shards = _shards(groups, job, worker, experiment._watched)
            for shard in shards:
                if shard.dealt is not None:
                    stack.callback(shard.dealt.close)
            stopped = False
            try:
                (experiment.eval_loop if job.evaluate else experiment.worker_loop)(shards)
            except LoopStopped:
                stopped = True
            if any(shard.dealt for shard in shards):
                with contextlib.suppress(RuntimeError):  # another worker failed, and tells why
                    shared(None)  # nobody leaves before all are done: the first worker owns what deals streams
            ending = Ending(experiment._end(), stopped, frozenset(run.logged_names))
            if run.tracking is not None:
                run.tracking.end("STOPPED" if stopped else "SUCCEEDED", ending.metrics)
            return ending


class _DebuggerRefused:
    """A worker has no terminal for pdb, and says so once; a debugger that the user has chosen may find another way."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._told = sink, False

    def __call__(self) -> bool:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen and not chosen.startswith("ray."):  # Ray sets its own, which would wait for somebody to attach
            return chosen != "pdb.set_trace"
        if not self._told:
            text = "breakpoint() is ignored: workers have no terminal; to debug, add cfg.start_workers=0"
            self._sink.send({"kind": "notice", "text": text, "once": True})
            self._told = True
        return False


def _built(job: Job, worker: Worker, stack: contextlib.ExitStack) -> tuple[dict[str, Any], BaseModule]:
    """All groups as live objects, and the experiment made of them."""
    cls = object_at(job.experiment)
    cfg = build_cfg(job.tree["cfg"])
    if cfg.use_gpu and worker.device.type == "cpu":
        cure = "mlx doctor shows what torch finds; cfg.use_gpu=null takes what there is"
        raise ConfigError(f"cfg.use_gpu=true, but rank {worker.rank} has no GPU that torch can use; {cure}")
    if cfg.deterministic:
        stack.enter_context(_deterministic())
    groups = _build_groups(job.tree, cfg, worker)
    return groups, cls(**groups)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch use only algorithms that give the same numbers each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants to know before it starts
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def _run_of(job: Job, worker: Worker, cfg: TrainConfig, sink: Sink, stack: contextlib.ExitStack) -> WorkerRun:
    """The run as this worker takes part in it."""
    folder = job.folder
    run = WorkerRun(folder, worker, job.tree, stop_asked=sink.stop_asked, preemptible=job.preemptible, shown=job.shown)
    run.evaluates = job.evaluate
    if worker.writes:
        run.sink, run.forwarded = sink, Listeners(cfg.callbacks, "callbacks", print).wants("on_report")
        files = [pattern for tracker in cfg.trackers.values() for pattern in getattr(tracker, "files", ())]
        folder.pull(folder.metrics.name, *files)  # rank 0 may be on another machine than before
        folder.path.mkdir(parents=True, exist_ok=True)
        ours = partial(_is_ours, folder, job.attempt)
        info = RunInfo(job.name, job.run, folder.path, folder.place, job.shown, job.attempt)
        host = ray.util.get_node_ip_address() if job.engine == "ray" else "127.0.0.1"
        tracking = Tracking(info, folder, cfg.trackers, lambda text: run.send("notice", text=text), ours, host)
        run.tracking = stack.enter_context(tracking)
        run.allowed = partial(_push_if_ours, folder, job.attempt, tracking)
    return run


def _push_if_ours(folder: RunFolder, attempt: int, tracking: Tracking) -> None:
    """Before a checkpoint becomes visible: what it remembers of the logs must be stored, and the run still ours.

    Raises:
        StorageError: another driver has taken over.
    """
    if not _is_ours(folder, attempt):
        raise StorageError(f"{folder.title} was taken over by another driver; this one writes no more")
    tracking.push(must=True)


def _is_ours(folder: RunFolder, attempt: int) -> bool:
    return folder.attempts() <= attempt


def _standing(run: WorkerRun) -> Event:
    stage = run.stage
    gpu = run.worker.device.type == "cuda"
    return {"epoch": run.epoch, "stage": stage.name if stage else None, "step": stage.step if stage else 0, "gpu": gpu}


def _build_groups(tree: Mapping[str, Any], cfg: TrainConfig, worker: Worker) -> dict[str, Any]:
    """All groups as live objects; the optimizers last, over models that are on the device already."""
    groups: dict[str, Any] = {"cfg": cfg}
    seed_everything(cfg.seed)
    for name, node in tree.items():
        if name == "datasets":
            groups[name] = _build_datasets(node, cfg.seed)
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


def _shards(groups: Mapping[str, Any], job: Job, worker: Worker, watched: Callable[[Loader], Loader]) -> DatasetShards:
    """One shard per argument of `Datasets`, in order."""
    cfg = groups["cfg"]
    nodes = {name: node for name, node in job.tree.get("datasets", {}).items() if not name.startswith("_")}
    streams = [name for name in streams_of(job.tree) if name not in job.prepared]
    dealers = {}
    if streams and job.engine == "in_process":
        dealers = {name: Dealer(nodes[name], name, cfg.seed, job.project) for name in streams}
    elif streams:
        place = (cfg.seed, job.project, worker.world_size)
        first = worker.rank == 0
        dealers = shared({name: start_dealer(nodes[name], name, *place) for name in streams} if first else None)
    dealt = {name: DealtReader(dealer, name) for name, dealer in dealers.items()}
    ahead = {"processes": job.reading.count, "prefetch_batches": cfg.prefetch_batches}
    limits = [limit for limit in (cfg.limit_batches, cfg.overfit_batches) if limit is not None]
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
                wanted_workers=cfg.start_workers if cfg.keep_global_batch and job.engine != "in_process" else None,
                accumulate=cfg.accumulate_grad_batches,
                limit=min(limits, default=None),
                repeats=cfg.overfit_batches is not None,
                watched=watched,
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
        "world_size": worker.world_size,
    }


@contextlib.contextmanager
def _user_errors(rank: int, project: Path) -> Iterator[None]:
    """Turn what user code raises into one error with the user's frames and the rank."""
    try:
        yield
    except RAISED_BY_USERS as error:
        if isinstance(error, MlxError) and not is_users(error, project):
            raise
        if lost_peer(error):
            raise WorkerLostError(f"rank {rank} lost its connection to another worker: {first_line(error)}") from None
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        hint = " (worker_loop must return, not exit)" if isinstance(error, SystemExit) else ""
        summary = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ") + notes + hint
        raise WorkerLoopError(rank, summary, user_frames(error, project)) from None


def streams_of(tree: Mapping[str, Any]) -> list[str]:
    """Names of the datasets that are streams of Ray Data."""
    return [name for name, node in described(tree).items() if hasattr(object_at(node["_target_"]), "to_ray")]


def described(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The nodes of the datasets that conf.yaml describes, by name."""
    nodes = tree.get("datasets", {}).items()
    return {name: node for name, node in nodes if isinstance(node, dict) and "_target_" in node}
