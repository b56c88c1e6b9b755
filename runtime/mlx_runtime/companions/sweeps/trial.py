"""One run of a sweep: the work of its process, and the record if that process dies."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_runtime.companions.notebook.background import conf_of
from mlx_runtime.companions.notebook.functions import load_function
from mlx_runtime.companions.sweeps.scores import plain_keys
from mlx_runtime.companions.sweeps.space import Part
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.projects import AN_EXPERIMENT, main_class
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.console_lines import ConsoleLines
from mlx_runtime.driver.driver import Driver
from mlx_runtime.driver.planning import connect, prepare_run
from mlx_runtime.driver.request import RunConfig, load_config
from mlx_runtime.errors import ConfigError, MlxError, StorageError, full_message
from mlx_runtime.events import Event, RunEnded, RunStarted
from mlx_runtime.loop.job import Cluster
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.runs.logs import LogFile, log_name
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import split_options
from mlx_runtime.storage.redaction import redact
from mlx_runtime.tracking.console import Display
from mlx_runtime.workers.stop_requests import StopRequests, sigterm_stops
from mlx_runtime.workers.worker import ignore_breakpoints


@dataclass(frozen=True)
class TrialJob:
    """A run of a sweep, for the process that trains it."""

    sweep: str  # like `sweep_001`
    trial: int  # from 1
    index: int  # of the run in its trial
    part: Part  # seed and fold of the run
    values: Mapping[str, str] = field(hash=False)  # by key, as in overrides
    run: str  # path or URI of its claimed folder
    overrides: tuple[str, ...]  # all overrides of its config
    experiment: str = ""  # path of its class; empty for `src.experiment`
    gpus: float = 0  # reserved GPUs, or the share of one; there is no fallback to the CPU

    @property
    def folder(self) -> RunFolder:
        base, options = split_options(self.run)
        root, experiment, name = base.rsplit("/", 2)
        return run_folder(root + options, experiment, name)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the sweep for the record of the run."""
        return {"name": self.sweep, "trial": self.trial, **self.part._asdict(), "values": plain_keys(self.values)}


def run_trial(job: TrialJob, emit: Callable[[Event], None], control: StopRequests) -> RunEnded:
    """Train a run of a sweep in this process, in the folder of the experiment. In the main thread, SIGTERM stops it.

    All output of the process goes to the log of the run. Errors end the run, and are not raised.
    """
    ended: RunEnded | None = None

    def handle(event: Event) -> None:
        nonlocal ended
        if isinstance(event, RunEnded):
            ended = event
        elif isinstance(event, RunStarted) and event.run.attempt > 1:
            print(f"\n--- {documents.now()}: attempt {event.run.attempt}")
        emit(event)

    with _captured(LogFile(job.folder, log_name())):
        try:
            _train(job, handle, control)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            if isinstance(error, MlxError):
                print(f"error: {full_message(error)}", file=sys.stderr)
            elif not stopped:
                traceback.print_exception(error)
            if ended is None:  # before the run existed
                status = "FAILED" if not stopped else "PRUNED" if control.pruned else "STOPPED"
                ended = RunEnded(status, {}, error=error)
                record_end(job, status, "" if stopped else full_message(error))
    assert ended is not None, "a run without an error has an end"
    return ended


@contextlib.contextmanager
def _captured(log: LogFile) -> Iterator[None]:
    """Within the block, redirect the output of this process and its native libraries to a log; then close it."""
    streams = (1, sys.stdout), (2, sys.stderr)
    before = [os.dup(descriptor) for descriptor, _ in streams]
    try:
        for descriptor, stream in streams:
            stream.flush()
            if log.stream is not None:
                os.dup2(log.stream.fileno(), descriptor)
        yield
    finally:
        for (descriptor, stream), saved in zip(streams, before, strict=True):
            stream.flush()
            os.dup2(saved, descriptor)
            os.close(saved)
        log.close()


def _train(job: TrialJob, handle: Callable[[Event], None], control: StopRequests) -> None:
    """Train like `mlx train run`, after the import of the experiment."""
    experiment = main_class(AN_EXPERIMENT, Path.cwd()) if not job.experiment else object_at(job.experiment)
    with conf_of(experiment) as conf:
        request = replace(Request.parse(job.overrides), claimed=job.run)
        config = replace(load_config(experiment, request, conf), sweep=job.facts)
    load_function(config.cfg)  # its errors come before the run begins
    with connect(config.cfg) as cluster:
        refuse_fallback(job, config, cluster)
        own = job.gpus / max(1, config.cfg.start_workers)  # whole GPUs, or the share of one
        own = own if own < 1 else own // 1
        cluster = replace(cluster, use_gpu=cluster.use_gpu and job.gpus > 0, gpus_per_worker=own)
        with contextlib.ExitStack() as stack:
            # `ray job stop` signals all processes of a job, and the sweep asks its trials to stop as well.
            stack.enter_context(sigterm_stops(control, once=True))
            plan = stack.enter_context(prepare_run(experiment, config, cluster))  # forks, so before any threads
            ignore_breakpoints(handle)
            display = stack.enter_context(contextlib.closing(Display(sys.stdout, epochs=config.cfg.num_epochs)))
            driver = Driver(plan, [handle, ConsoleLines(display, plan).handle], control=control)
            driver.run()


def refuse_fallback(job: TrialJob, config: RunConfig, cluster: Cluster) -> None:
    """Refuse to train on CPUs if the run was planned for GPUs."""
    if job.gpus and not cluster.use_gpu and config.cfg.use_gpu is not False:
        raise ConfigError(
            f"trial {job.trial} should train on {job.gpus:g} GPUs, but its process finds {cluster.gpus:g} for "
            f"{max(1, config.cfg.start_workers)} workers; free them, or pass --gpus-per-trial 0"
        )


def record_end(job: TrialJob, status: str, error: str = "") -> None:
    """Record the end of a run whose process has died, or failed before the run began.

    A run that was about to resume stays unchanged, and so does a stopped one that has not begun.
    """
    folder, before = job.folder, dict[str, Any]()
    with contextlib.suppress(StorageError):
        before = records.load_record(folder)
    if before.get("status") not in (None, *records.LIVING) or (not before and status == "STOPPED"):
        return
    with contextlib.suppress(StorageError):
        record = records.Record(folder, before, sweep=job.facts, stop_reason=before.get("stop_reason"))
        record.finish(status, **({"error": redact(error)} if error else {}))
