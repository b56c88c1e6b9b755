"""A worker: join the process group, build the experiment, run its loop, and report the result to the driver."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mlx_runtime import companions
from mlx_runtime.config.building import build_cfg
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.data.loaders import DatasetShards, unused_prefetch
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.topology import Topology, device_here
from mlx_runtime.distributed.wrapping import raised_by_sharded_tensors
from mlx_runtime.errors import (
    MlxError,
    WorkerLoopError,
    WorkerLostError,
    note,
    short_message,
    user_errors,
    user_traceback,
)
from mlx_runtime.events import Event, LoopEnded, Notice, WorkerPosition
from mlx_runtime.importing import add_to_path, after_import
from mlx_runtime.loop.assembly import build_experiment, dataset_shards
from mlx_runtime.loop.context import Groups, RunContext
from mlx_runtime.loop.examples import ExampleRecorder
from mlx_runtime.loop.experiment import BaseModule, attach
from mlx_runtime.loop.job import Cluster, Direct, Handle, Inbox, Job, Sink, StopAsked, address_towards
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.session import Session
from mlx_runtime.loop.stopping import LoopStopped
from mlx_runtime.loop.strategies import strategy_of
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import Log
from mlx_runtime.settings import environment
from mlx_runtime.tracking.trackers import ReportWriter
from mlx_runtime.workers.placement import changing_size, this_machine

if TYPE_CHECKING:
    from mlx_runtime.workers.connections import Remote


NO_TERMINAL = "workers have no terminal; to debug, add cfg.start_workers=0"


def train_to(sink: Sink, job: Job, topology: Topology) -> None:
    """Train, and send the result to the driver from rank 0."""
    result = work(job, topology, sink)
    if topology.writes:
        sink.send(result)


def work(job: Job, topology: Topology, sink: Sink) -> LoopEnded:
    """Build the experiment on this worker and run its loop."""
    if not job.project.is_dir():  # on another machine, Ray has unpacked the project into the working directory
        job = replace(job, project=Path.cwd())
    add_to_path(job.project)
    with contextlib.ExitStack() as stack:
        stack.enter_context(topology.entered())
        if not job.cluster.captures_output:
            stack.enter_context(Log(job.folder, topology.rank))
        if not isinstance(sink, Direct):
            ignore_breakpoints(sink.send)
        with loop_errors(topology.rank, job.project):
            cfg: TrainConfig = build_cfg(job.tree["cfg"], TrainConfig)
            strategy = strategy_of(cfg, topology, job.tree.get("models"))
            if job.prepares:
                job = companions.part("prepared.preparation").write_together(job, topology, cfg, sink.send)
            stack.enter_context(strategy.connected())
            topology = stack.enter_context(strategy.topology.entered())
            groups, experiment = build_experiment(job, topology, cfg, strategy)
        torch.set_num_threads(cfg.cpus_per_worker)
        traits = job.cluster.preempted, job.cluster.shares_storage
        context = RunContext(
            job.folder, topology, cfg, Groups(experiment), job.tree, job.run.config, job.evaluate, *traits
        )
        tracking = stack.enter_context(_report_writer(job, cfg, sink)) if topology.writes else None
        hooks = {"examples": ExampleRecorder(job.folder)} if tracking is not None and _predicts(experiment, job) else {}
        session = Session(context, strategy, sink, tracking, hooks)
        attach(experiment, session)
        _observe(session, job, sink, stack)
        with loop_errors(topology.rank, job.project):
            if topology.writes:
                sink.send(strategy.started(groups.get("models")))
            if strategy.notice is not None:
                session.reporter.notice(strategy.notice)
            if (text := unused_prefetch(cfg.loader, cfg.prefetch_batches)) is not None:
                session.reporter.notice(text)
            session.begin()
            shards = dataset_shards(cfg, groups.get("datasets"), job, strategy, session.watch)
            _run_loop(experiment, shards, job, stack, session)
            stopped = session.stopping.stopped
            result = LoopEnded(session.end(), stopped, tuple(sorted(session.reporter.logged)))
            checks = hooks and not (stopped or cfg.compile or strategy.shards)
            if checks and (problem := hooks["examples"].problem(experiment, topology.device)):
                session.reporter.warn(problem)
            if tracking is not None:
                tracking.end("STOPPED" if stopped else "SUCCEEDED", result.metrics)
            return result


def _predicts(experiment: BaseModule, job: Job) -> bool:
    """Return True if a run trains an experiment with `predict`, whose examples are recorded."""
    predicts = type(experiment).predict is not BaseModule.predict
    return predicts and not job.evaluate and "serving" in companions.COMPANIONS


def enter_ray_train(job: Job, topology: Topology | None = None) -> None:
    """Make `ray.train` work in this process once user code imports it; `topology` is None in the driver."""

    def enter() -> None:
        companions.part("ray.private").enter_ray_train(job.run.experiment, topology, quiet=not job.verbose)

    if "ray" in companions.COMPANIONS:
        after_import("ray.train", enter)
        if not job.cluster.reads_streams:  # the workers have no Ray
            after_import("ray", lambda: companions.part("ray.private").refuse_ray())


_NOT_MIXED = (
    "sharded and whole tensors do not mix; call the model itself, not another of its methods, and do not wrap it in "
    "DistributedDataParallel; on every worker, tensor.full_tensor() returns the whole of a sharded one; Adafactor, "
    "Rprop and SGD with fused=True cannot take sharded parameters"
)


@contextlib.contextmanager
def loop_errors(rank: int, project: Path) -> Iterator[None]:
    """Translate exceptions of user code within the block; those of the runtime pass through unchanged.

    Raises:
        WorkerLoopError: user code failed; contains its frames in `project`.
        WorkerLostError: user code failed because another worker was lost.
    """

    def translate(error: BaseException, summary: str, trace: str) -> MlxError:
        from mlx_runtime.distributed.collectives import lost_peer

        if lost_peer(error):
            return WorkerLostError(f"rank {rank} lost its connection to another worker: {short_message(error)}")
        hint = " (return instead of exiting)" if isinstance(error, SystemExit) else ""
        if isinstance(error, AttributeError) and isinstance(error.obj, DistributedDataParallel):
            name = error.name
            hint = f" (mlx_runtime.unwrap(model).{name} works; to train by {name}, call it in the model's forward)"
        if out_of_memory(error):
            trace = f"{trace}\n{SAVE_MEMORY}".lstrip("\n")
        elif raised_by_sharded_tensors(error):
            hint = f" ({_NOT_MIXED})"
        elif "Array has been deleted" in summary:  # of JAX
            hint = " (a call that donated it has deleted it: do not use it after that call)"
        return WorkerLoopError(f"{summary}{hint} (raised on rank {rank})\n{trace}".rstrip())

    try:
        with user_errors(project, translate):
            yield
    except MlxError as error:
        if type(error) is MlxError:  # user code called a method wrongly, so its line is the place to look
            error.args = (f"{error}\n{user_traceback(error, project)}".rstrip(),)
        if out_of_memory(error.__cause__):  # the constructor of a model, for example
            error.args = (f"{error}\n{SAVE_MEMORY}",)
        raise


SAVE_MEMORY = (
    "To save memory: cfg.activation_checkpointing=true, cfg.precision=bf16, cfg.strategy=fsdp with more workers, or a "
    "lower batch_size with a higher cfg.accumulate_grad_batches"
)


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error says that there is no memory left on the CPU or the GPU."""
    # For the CPU, torch has no class of errors.
    on_cpu = type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def ignore_breakpoints(send: Callable[[Event], None], why: str = NO_TERMINAL) -> None:
    """Ignore `breakpoint()` in this process, with one notice, unless PYTHONBREAKPOINT names another debugger than pdb.

    Ray's debugger, which Ray sets in its workers, would wait for a user to attach.
    """
    if os.environ.get("PYTHONBREAKPOINT", "").partition(".")[0] in ("", "pdb", "ray"):
        notice = Notice(f"breakpoint() is ignored: {why}", once=True)
        sys.breakpointhook = lambda *_, **__: send(notice)


def _run_loop(
    experiment: BaseModule, shards: DatasetShards, job: Job, stack: contextlib.ExitStack, session: Session
) -> None:
    """Run user code's loop, to its end or until the session leaves it."""
    streams = [shard.stream for shard in shards if shard.stream is not None]
    for stream in streams:
        stack.callback(stream.close)
    try:
        with contextlib.suppress(LoopStopped):
            (experiment.eval_loop if job.evaluate else experiment.worker_loop)(shards)
    except ValueError as error:  # as BatchNorm raises
        item = session.passes.latest  # the error has ended its iteration
        part = item.part if item is not None and item.training else None
        if item and part and part.left and part.given and part.sizes[part.given - 1] == 1 < part.plan.batch_size:
            note(error, f"in step {item.step} of datasets.{item.dataset}, which has one row; drop_last leaves it out")
        raise
    if streams:
        with contextlib.suppress(RuntimeError):  # another worker failed, and reports the error
            broadcast(None)  # rank 0 owns the assigners of streams, so no worker leaves before all are done


def _observe(session: Session, job: Job, sink: Sink, stack: contextlib.ExitStack) -> None:
    """Attach the watchdog and the hooks of optimizers to a session."""
    cfg = session.context.cfg
    if (observe := getattr(session.optimization.strategy, "observe", None)) is not None:
        observe(session)
    if isinstance(sink, Direct):
        sink.position = partial(_position, session)
    else:
        from mlx_runtime.workers.deadlocks import Watchdog  # imported here, because a single process cannot deadlock

        watchdog = Watchdog(cfg.elastic.hang_timeout_s, sink.send, partial(_position, session), job.project)
        stack.callback(watchdog.close)
        cast("Remote", sink).position, session.beat = watchdog.position, watchdog.beat

    def before_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        session.update_begins(optimizer)
        session.optimization.before_update(optimizer)

    stack.callback(register_optimizer_step_pre_hook(before_update).remove)
    stack.callback(register_optimizer_step_post_hook(lambda item, *_: session.update_finished(item)).remove)
    if session.optimization.strategy.tuning is not None and not job.evaluate:
        session.optimization.strategy.tuning.observe(session, stack)
    if cfg.replicas.every is not None and not job.evaluate:
        stack.enter_context(companions.part("fragments.replicas").averages(session))
    stack.callback(session.checkpoints.settle)  # a checkpoint in progress is stored even if the loop fails


def _report_writer(job: Job, cfg: TrainConfig, sink: Sink) -> ReportWriter:
    """Return the recorder of metrics, after copying those of previous attempts to the run folder."""
    folder = job.folder
    files = [pattern for tracker in cfg.trackers.values() for pattern in getattr(tracker, "files", ())]
    folder.pull(folder.metrics.name, *files)  # rank 0 may be on another machine than in the attempt before
    folder.path.mkdir(parents=True, exist_ok=True)
    info = replace(job.run, folder=folder.path)
    forward = sink.send if any(hasattr(item, "on_report") for item in cfg.callbacks.values()) else None
    return ReportWriter(
        info, folder, cfg.trackers, lambda text: sink.send(Notice(text)), forward, address_towards(job.receiver[0])
    )


def _position(session: Session) -> WorkerPosition:
    topology, latest = session.context.topology, session.passes.latest
    name, step = (None, 0) if latest is None else (latest.name, latest.step)
    if session.progress.global_step and session.own_steps is not None:
        name, step = "update", session.progress.global_step
    return WorkerPosition(topology.rank, session.progress.epoch, name, step, gpu=topology.device.type == "cuda")


class InProcess:
    """The engine for `cfg.start_workers=0`. It is also its own group, without workers: polling it trains."""

    inbox = Inbox

    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> None:
        return None

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Iterator[Cluster]:
        here = this_machine(cfg, "in-process engine")
        title = "0: training in this process"
        if sizes := changing_size(cfg):
            title += f"; {sizes.partition(' ')[0]} needs workers and has no effect"
        yield replace(here, title=title, cpus=0, in_driver=True, reads_streams=True)

    def __init__(self, cfg: Any, cluster: Cluster, *, timeout_s: float) -> None:
        self._cfg, self._variables = cfg, {} if cluster.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        self._stack = contextlib.ExitStack()

    def start(self, job: Job, handle: Handle, stop_asked: StopAsked) -> "InProcess":
        if any(name not in job.prepared for name in stream_names(job.tree)):
            self._stack.enter_context(companions.part("ray.start").start_ray(self._cfg))
        self._sink = Direct(handle, stop_asked)
        self._train = partial(train_to, self._sink, job)
        enter_ray_train(job)
        return self

    def poll(self) -> bool:
        with environment(self._variables, replace=True):
            self._train(Topology(0, 1, device_here()))
        return False

    def waits_for(self) -> None:
        return None

    def locate(self, folder: RunFolder) -> None:
        """Answer a request for the position of the run."""
        from mlx_runtime.workers.deadlocks import answer_here

        answer_here(folder, self._sink.position())

    def close(self) -> None:
        self._stack.close()
