"""The engine of a sweep: trials are processes, forked from a server that has imported the experiment.

They start on the machine of the sweep; in the job of a cluster, their workers are spread over it. Start the server with
`workers.local.warm_up`, right after the import and before the first thread.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from typing import Any

from mlx_runtime.companions.notebook.links import PRUNE, Link, RunProcess
from mlx_runtime.companions.sweeps.controller import Sweep
from mlx_runtime.companions.sweeps.trial import TrialJob, record_end, run_trial
from mlx_runtime.errors import ConfigError, UsageError, full_message
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.logs import LogFile, log_name
from mlx_runtime.runs.tables import plural
from mlx_runtime.workers import placement
from mlx_runtime.workers.fork_server import exit_reason
from mlx_runtime.workers.local import cool_down, take_server, warm_up

PRELOADED = (__name__, "mlx_runtime.workers.worker")
"""What trials import in addition to what workers do."""

STOP = "the sweep stops"
"""Reason with which trials are asked to stop with a checkpoint."""

POLL_S = 0.2
"""Interval at which requests to stop are noticed."""

EXIT_S = 10.0
"""How long the process of a trial may take to exit once its run has ended."""


@dataclass(frozen=True)
class Slots:
    """Room for the trials that run at the same time."""

    environments: tuple[Mapping[str, str], ...]  # variables of the trial in each slot
    gpus: float  # per trial; below 1, trials share a GPU


def slots(cfg: TrainConfig, parallel: int | None = None, gpus_per_trial: float | None = None) -> Slots:
    """Return as many slots as asked for, by default as many as fit on this machine or, in a job, on its cluster.

    Raises:
        ConfigError: not even one trial fits.
        UsageError: see `room` and `refuse_no_workers`.
    """
    if placement.JOB_FLAG in os.environ:
        from mlx_runtime.companions.ray.start import on_ray

        refuse_no_workers(cfg)
        with on_ray(cfg) as cluster:
            number, gpus = room(cfg, cluster.cpus, cluster.gpus, parallel, gpus_per_trial, cluster=True)
        return Slots(({"MLX_JOB": ""},) * number, gpus)  # the job is that of the sweep
    import torch

    cores, total = os.cpu_count() or 1, torch.cuda.device_count()
    if lacking := placement.shortage(cfg, cores, total, cluster=False):
        raise ConfigError(lacking)
    cores = cores if parallel else placement.usable_cores()
    number, gpus = room(cfg, cores, total, parallel, gpus_per_trial, cluster=False)
    if not gpus:
        return Slots(({"CUDA_VISIBLE_DEVICES": ""},) * number, 0)
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(total)))).split(",")[:total]
    whole = int(gpus)
    own = [visible[slot * whole : (slot + 1) * whole] if whole else [visible[slot % total]] for slot in range(number)]
    return Slots(tuple({"CUDA_VISIBLE_DEVICES": ",".join(devices)} for devices in own), gpus)


def refuse_no_workers(cfg: TrainConfig) -> None:
    """Raise a UsageError if the trials of a sweep on a Ray cluster would not train in workers."""
    if not cfg.start_workers:
        raise UsageError("on a cluster, the trials of a sweep train in workers: set cfg.start_workers=1")


def room(
    cfg: TrainConfig,
    cpus: float,
    gpus: float,
    parallel: int | None = None,
    gpus_per_trial: float | None = None,
    *,
    cluster: bool,
) -> tuple[int, float]:
    """Return how many runs train at the same time, by default as many as fit, and the GPUs that each of them has.

    On one machine, a run with GPUs reserves no cores, and at least one run fits.

    Args:
        cfg: settings that all runs have in common.
        cpus: of the machine or the cluster.
        gpus: of the machine or the cluster.
        parallel: runs at the same time that the user asks for.
        gpus_per_trial: GPUs, or the share of one, that the user asks for.
        cluster: True if workers reserve CPUs, and have at most `cfg.gpus_per_worker` GPUs each.

    Raises:
        UsageError: fewer fit than asked for, or workers and GPUs do not match.
    """
    workers = max(1, cfg.start_workers)
    all_gpus = workers * cfg.gpus_per_worker
    own = gpus_per_trial
    if own is None:
        own = float(all_gpus) if placement.uses_gpus(cfg, gpus) else 0.0
    elif cfg.use_gpu is not None and cfg.use_gpu != bool(own):
        raise UsageError(f"--gpus-per-trial {own:g} contradicts cfg.use_gpu={str(cfg.use_gpu).lower()}")
    if (workers > 1 and 0 < own < workers) or (own > 1 and own % 1) or (cluster and own > all_gpus):
        needs_whole = f"each needs whole GPUs (cfg.gpus_per_worker={cfg.gpus_per_worker})"
        cause = f"{needs_whole}, and only a single worker can have a share of one"
        raise UsageError(f"--gpus-per-trial is {own:g} for {plural(workers, 'worker')}: {cause}")
    fits, needs = [], []
    if cluster or not own:
        each = workers * cfg.cpus_per_worker
        fits.append(int(cpus // each) if cluster else max(1, int(cpus // each)))
        needs.append(f"{each} of {cpus:g} {'CPUs' if cluster else 'cores'}")
    if own:
        fits.append(int(gpus // own) if own >= 1 else int(gpus) * int(1 / own))
        needs.append(f"{own:g} of {gpus:g} GPUs")
    if min(fits) < (asked := parallel or 1):
        need = " and ".join(needs)
        raise UsageError(
            f"cannot run {plural(asked, 'trial')} at a time: each needs {need}, so at most {min(fits)} fit"
        )
    return parallel or min(fits), own


class Engine:
    """Runs the trials of a sweep. Construct it in the main thread, before other threads and before signals are handled.

    Args:
        cfg: settings that all trials have in common.
        parallel: trials at the same time.
        gpus_per_trial: GPUs, or the share of one, of each trial.

    Raises:
        ConfigError, UsageError: this does not fit; see `slots`.
    """

    def __init__(self, cfg: TrainConfig, *, parallel: int | None = None, gpus_per_trial: float | None = None) -> None:
        if placement.is_launched():
            raise ConfigError("torchrun cannot train sweeps; run `mlx train sweep` without it, or on a cluster")
        placement.engine_for(cfg)  # refuses what the engine of the trials cannot train
        self._server = take_server()
        try:
            self._room = slots(cfg, parallel, gpus_per_trial)
        except BaseException:
            self.close()
            raise
        self._free = list(range(len(self._room.environments)))
        self._server.preload(*PRELOADED)
        self._numbers = itertools.count()
        self._running: dict[int, _Trial] = {}

    def run(self, sweep: Sweep) -> None:
        """Run all that the sweep gives, until nothing is left.

        Raises:
            MlxError: the fork server has ended, and all trials with it.
        """
        while True:
            while self._free and not sweep.stopping and (job := sweep.next()) is not None:
                self._start(job)
            if not self._running:
                return
            connection.wait([self._server.fileno(), *(trial.events for trial in self._running.values())], POLL_S)
            for trial in self._running.values():
                self._forward(trial, sweep)
            for number, code in self._server.exits():
                self._end(self._running.pop(number), code, sweep)
            self._stop(sweep)

    def close(self) -> None:
        """Kill the trials that are still running, and end the server."""
        self._server.close()

    def _start(self, job: TrialJob) -> None:
        slot, number = self._free.pop(0), next(self._numbers)
        target = partial(work, replace(job, gpus=self._room.gpus))
        variables = {**os.environ, **self._room.environments[slot]}
        self._running[number] = _Trial(job, slot, self._server, number, target, variables)

    def _forward(self, trial: "_Trial", sweep: Sweep) -> None:
        """Pass the events of a trial on, and prune all of its runs if the sweep wants that."""
        for event in trial.read():
            if sweep.handle(trial.job, event):
                for other in self._running.values():
                    if other.job.trial == trial.job.trial:
                        other.ask(PRUNE)

    def _stop(self, sweep: Sweep) -> None:
        """Stop or kill trials if the sweep wants that, and kill those that do not exit."""
        for number, trial in self._running.items():
            if sweep.stopping:
                trial.ask(STOP)
            if sweep.killing or (trial.ended is not None and time.monotonic() - trial.ended_at > EXIT_S):
                self._server.kill(number)

    def _end(self, trial: "_Trial", code: int, sweep: Sweep) -> None:
        """Report the end of a trial whose process has ended."""
        self._forward(trial, sweep)
        trial.events.close()
        self._free.append(trial.slot)
        if (ended := trial.ended) is not None:
            failed = ended.error if ended.status == "FAILED" else None
            sweep.ended(trial.job, ended.status, full_message(failed) if failed is not None else "")
            return
        status, error = ("STOPPED", "") if sweep.killing else ("FAILED", f"its process {exit_reason(code)}")
        record_end(trial.job, status, error)
        with contextlib.closing(LogFile(trial.job.folder, log_name())) as log:
            log.write(f"{'error: ' if error else ''}{error or 'killed'}\n")
        sweep.ended(trial.job, status, error)


class _Trial(RunProcess):
    """The process of a run, and its state."""

    def __init__(self, job: TrialJob, slot: int, *started: Any) -> None:
        super().__init__(*started)
        self.job, self.slot = job, slot


def work(job: TrialJob, engine: Any) -> int:
    """Run a trial in this process, which the server has just started; `engine` is the connection to it."""
    warm_up()  # before the storage starts threads
    link = Link(engine)
    ended = run_trial(job, link.emit, link.control)
    cool_down()  # the run may have failed before it used the server, which would keep this process from exiting
    link.finish(ended)
    return 0
