"""`Trainer`: functions that train on several workers, in runs like any other, and objects kept on workers."""

import base64
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from mlx_runtime.companions.notebook import cluster_runs
from mlx_runtime.companions.notebook.actors import Actors
from mlx_runtime.companions.notebook.backends import backend_class, require_library
from mlx_runtime.companions.notebook.background import RunJob
from mlx_runtime.companions.notebook.calls import FIXED, MOST_WORKERS, override, run_settings, sizes
from mlx_runtime.companions.notebook.cluster_runs import ClusterRun
from mlx_runtime.companions.notebook.functions import FunctionConfig, FunctionExperiment
from mlx_runtime.companions.notebook.runs import RunIterator, Training
from mlx_runtime.config.constructors.signatures import convert, parameters, type_name
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import ConfigError, MlxError, RunStopped, UsageError, short_message, suggest
from mlx_runtime.events import Event, FunctionReport, FunctionReturned
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.runs.queries.reader import Run, open_run
from mlx_runtime.runs.tables import print_table
from mlx_runtime.sections import Elastic, Section
from mlx_runtime.storage.files import join_path
from mlx_runtime.workers.placement import JOB_FLAG, engine_for, usable_cores, uses_gpus

Results = list[dict[str, Any]]
"""Reports of all workers, by rank."""

OWN = ("num_epochs", "restore_checkpoint_path", "start_epoch", "start_workers")
"""Settings that `Trainer` sets itself."""

RUN_OPTIONS = ("callbacks", "checkpoint", "dataset", "fold", "resume", "show")
"""Keyword arguments of `Trainer.run_iterator`."""

FORMER = {
    "checkpoint_strategy": "Use Trainer(keep_checkpoints=3, monitor='loss', mode='min')",
    "datasets": "Write trainer.run(train_func, config, dataset={'train': rows})",
    "logdir": "Use storage_path= and name=; a run is in storage_path/name/run_001",
    "max_retries": "Use elastic=Elastic(max_failures=3), with Elastic of mlx_runtime.sections",
    "resources_per_worker": "Use cpus_per_worker= and gpus_per_worker=",
    "resume_from_checkpoint": "Write trainer.run(train_func, config, checkpoint=path)",
    "run_config": "Use name=, storage_path=, keep_checkpoints=, monitor= and elastic=Elastic(max_failures=3)",
    "scaling_config": "Write Trainer(num_workers=2, use_gpu=True).run(train_func, config)",
    "train_loop_config": "Write trainer.run(train_func, config)",
    "train_loop_per_worker": "Write trainer.run(train_func, config)",
}
"""Arguments of the trainers of Ray Train and Ray SGD, and their replacements."""


class FunctionRun(RunIterator[Results]):
    """A run that was started by `Trainer.run_iterator`: an iterator of the workers' reports, as lists by rank."""

    def __init__(
        self,
        job: RunJob,
        callbacks: Sequence[Callable[[Results], object]],
        show: bool,
        remote: ClusterRun | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._returned: dict[int, FunctionReturned] = {}
        self._world_size = 0
        super().__init__(job, (), show, remote)

    def items(self, event: Event) -> Iterator[Results]:
        match event:
            case FunctionReport(values):
                results = [dict(item) for item in values]
                yield results  # first, because a callback may stop the run, and so receive the rest
                callbacks, self._callbacks = self._callbacks, ()  # after an error, none is called again
                for callback in callbacks:
                    callback(results)
                self._callbacks = callbacks
            case FunctionReturned(rank, world_size):
                self._returned[rank], self._world_size = event, world_size

    def is_finished(self) -> bool:
        """Return True if the run has ended, and the loop over it has received all results."""
        return self._end is not None and not self._unread

    def wait_for_checkpoint(self, previous: str | None) -> bool:
        """Wait for a checkpoint other than the previous one. Return False if the function seems to save none.

        Saving waits for the previous checkpoint, so one is complete before the second report after it.
        """
        while self.checkpoint_path == previous and len(self._unread) < 2 and self._end is None:
            self._receive()
        return self.checkpoint_path != previous

    def get_returns(self) -> list[Any]:
        """Wait for the end of the run, and return the return values of the function, by rank.

        Raises:
            MlxError: the run failed, or a value cannot be unpickled here.
            RunStopped: the run was stopped, so there are no values.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        if self.result().status != "SUCCEEDED":
            name = Path(self.folder).name
            raise RunStopped(f'{self.folder} was stopped before the function returned; resume it: resume="{name}"')
        missing = [rank for rank in range(self._world_size or 1) if rank not in self._returned]
        if missing:
            ranks = ", ".join(map(str, missing))
            text = f"{self.folder} has succeeded, but the return value of rank {ranks} has not arrived"
            raise MlxError(f"{text}; save large values with save_checkpoint")
        values = []
        for rank in range(self._world_size):
            if problem := self._returned[rank].problem:
                raise MlxError(problem)
            try:
                values.append(pickle.loads(base64.b64decode(self._returned[rank].pickled)))
            except Exception as error:  # unpickling can raise anything
                why = f"{type(error).__name__}: {short_message(error)}"
                text = f"what rank {rank} returned cannot be unpickled here: {why}. Return a state_dict, not the model"
                raise MlxError(text) from error
        return values


class Trainer:
    """Calls functions on several workers, or keeps an object on each of them.

        trainer = Trainer(num_workers=2)
        losses = trainer.run(train_func, config={"lr": 1e-3})

    Each call of `run` is a run like that of an experiment, with a folder in the storage of the working directory, a
    record, metrics and checkpoints. The function may call `report`, `save_checkpoint`, `load_checkpoint`,
    `get_dataset_shard`, `accelerate`, `world_rank`, `world_size` and `local_rank` of `mlx_runtime`, and use
    `torch.distributed`.

    `print(trainer)` prints its resources.

    Args:
        num_workers: number of workers, 1 or more; or a range like `(4, 8)` or `(4, math.inf)`: a group that starts with
            the minimum, and grows and shrinks with a Ray cluster.
        backend: `torch`; `jax` or `tensorflow`, whose collectives are set up besides those of torch; or the import path
            of a class of another package.
        address: dashboard of a Ray cluster to train on, like `http://head:8265`. Each run uploads the working
            directory and trains as a job there. If this machine lacks the folder of the storage, it is a folder of the
            cluster: the run is launched from there.
        settings: fields of `TrainConfig`, like `engine="ray"`, `cpus_per_worker=2`, `use_gpu=True`,
            `gpus_per_worker=2`, `elastic=Elastic(max_failures=0)`, `storage_path="runs"`. `name` defaults to the name
            of the function.

    Raises:
        UsageError, ConfigError: there is no such setting or backend, or a value is invalid.
    """

    def __init__(
        self,
        num_workers: int | tuple[int, float] = 1,
        *,
        backend: str = "torch",
        address: str | None = None,
        **settings: Any,
    ) -> None:
        if callable(num_workers):
            raise UsageError(f"Trainer takes no function. {FORMER['scaling_config']}")
        backend_class(backend)
        if address is None:  # otherwise the cluster has the library
            require_library(backend)
        known = {item.name: item.annotation for item in parameters(TrainConfig) or [] if item.name not in OWN}
        for name, value in settings.items():
            if name not in known:
                cure = FORMER.get(name) or suggest(name, [*known, "num_workers"]).lstrip()
                raise UsageError(f"{name!r} is not a setting of Trainer. {cure}")
            _check_type(name, value, known[name], "Trainer")
            if isinstance(value, Section):
                for item in parameters(type(value)) or []:
                    part = getattr(value, item.name)
                    _check_type(f"{name}.{item.name}", part, item.annotation, type(value).__name__)
        settings |= {} if backend == "torch" else {"backend": backend}
        own_cores = usable_cores() // max(1, settings.get("cpus_per_worker", 1))
        room = MOST_WORKERS if address is not None or JOB_FLAG in os.environ else own_cores
        workers, elastic = sizes(num_workers, settings.get("elastic", Elastic()), room)
        self.settings = {"start_workers": workers, **settings, **({} if elastic == Elastic() else {"elastic": elastic})}
        self._address, self._cfg = address, FunctionConfig(**self.settings)
        if problems := self._cfg.out_of_range(self._cfg):
            raise ConfigError("\n  ".join(problems))
        self._engine, _ = engine_for(self._cfg)
        if backend == "jax" and self._cfg.gpus_per_worker > 1:
            raise UsageError(
                "a worker of the backend jax has one GPU; use more workers, and leave out gpus_per_worker="
            )
        self._latest: FunctionRun | None = None
        self._actors: Actors | None = None

    # -- functions

    def run(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        *,
        folds: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """Call a function on every worker, and return its return values, by rank.

        Args:
            function: takes `config`, or no argument. It is pickled by cloudpickle, with what it uses of the script or
                the session that defines it. Without a config, it is called without an argument if possible.
            config: numbers, text, None, and lists and dicts of these; stored in the run's conf.yaml.
            folds: cross-validate: call `run` with `fold=(0, folds)`, `(1, folds)`, …, and return a list of the results.
            options: those of `run_iterator`.

        Raises:
            UsageError, ConfigError: the function cannot be called with these arguments; nothing was written.
            MlxError: the function raised an exception on a worker, or returned a value that cannot be pickled.
            RunStopped: the run was stopped.
            KeyboardInterrupt: it was interrupted here, and has stopped.
        """
        if unknown := sorted(options.keys() - set(RUN_OPTIONS)):
            former = FORMER.get(unknown[0])
            cure = f" {former}" if former else suggest(unknown[0], RUN_OPTIONS)
            raise UsageError(f"trainer.run has no argument {unknown[0]!r}.{cure}")
        if folds is None:
            return self.run_iterator(function, config, **options).get_returns()
        if type(folds) is not int or folds < 2 or "fold" in options:
            raise UsageError(f"folds is {folds!r}; it takes a number of folds, 2 or more, without fold=")
        if options.get("resume") is not None:
            raise UsageError("each fold is a run of its own; resume one by its name, without folds=: resume='run_001'")
        return [self.run(function, config, fold=(number, folds), **options) for number in range(folds)]

    def fit(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a UsageError that names `run`, for those who come from `TorchTrainer`."""
        raise UsageError("a Trainer has no fit(); write trainer.run(train_func, config)")

    def run_iterator(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        *,
        dataset: Any = None,
        fold: tuple[int, int] | None = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        resume: str | None = None,
        callbacks: Sequence[Any] = (),
        show: bool = True,
    ) -> FunctionRun:
        """Call a function on every worker, and return an iterator of their reports.

            for results in (running := trainer.run_iterator(train_func)):
                print(results[0]["loss"])
            values = running.get_returns()

        Args:
            function: the same as for `run`.
            config: the same as for `run`.
            dataset: rows that `get_dataset_shard` returns in the function: a torch Dataset with `__getitem__` and
                `__len__`, a Dataset of Ray Data, or a dict of these. Workers get a pickled copy, from a file in the
                storage.
            fold: `(2, 5)` splits the dataset into five shuffled folds of rows, and trains on all except number 2, which
                is the dataset `val` in the function.
            checkpoint: returned by `load_checkpoint` in the new run: a dict of numbers, text, tensors and objects with
                a `state_dict`, or the path or URI of a stored checkpoint.
            resume: run of this function to resume: `latest` or a name; values that are not in `config` stay as they
                were. `auto` resumes the latest run, if there is one, with exactly this config, and starts a new one
                otherwise. Without `dataset` and `fold`, those of the run are used.
            callbacks: functions, or objects with `handle_result(results)`; called in this process with each list of
                results.
            show: the same as for `mlx_runtime.run`.
        """
        if not isinstance(callbacks, Sequence):
            raise UsageError(f"callbacks is {callbacks!r:.60}; it takes a list")
        called = [_handler(item) for item in callbacks]
        options: dict[str, Any] = {"dataset": dataset, "fold": fold, "checkpoint": checkpoint, "resume": resume}
        if self._address is None:
            self._latest = FunctionRun(self._job(function, config, **options), called, show)
        else:
            job, remote = self._launched(self._address, function, config, **options)
            self._latest = FunctionRun(job, called, show, remote)
        return self._latest

    def launch(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        *,
        dataset: Any = None,
        fold: tuple[int, int] | None = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        resume: str | None = None,
    ) -> str:
        """Start a function on the cluster at `address`, and return the path or URI of the run without waiting for it.

        The run does not depend on this process. `reattach` follows it. The arguments are those of `run_iterator`.

        Raises:
            UsageError: this Trainer has no `address`.
            ClusterError: the cluster cannot run it; nothing was written.
        """
        if self._address is None:
            raise UsageError("launch needs a cluster: Trainer(address='http://HEAD:8265')")
        options: dict[str, Any] = {"dataset": dataset, "fold": fold, "checkpoint": checkpoint, "resume": resume}
        return self._launched(self._address, function, config, **options)[1].folder

    def _launched(self, address: str, *arguments: Any, resume: str | None, **options: Any) -> tuple[RunJob, ClusterRun]:
        cluster_runs.address_of(address)
        typed = self.settings.get("storage_path", "")
        if not cluster_runs.is_elsewhere(typed):
            job = self._job(*arguments, resume=resume, **options)
            return job, cluster_runs.launch(job, address)
        with tempfile.TemporaryDirectory() as folder:
            path, values = run_settings(self.settings, *arguments, root=folder, **options)
            job = run_job(path, values, resume)
            compared = {name: values[name] for name in ("name", "definitions", *FIXED) if name in values}
            return job, cluster_runs.launch_there(
                job, address, typed, folder=Path(folder), values=compared, resume=resume
            )

    def _job(
        self, function: Callable[..., Any], config: dict[str, Any] | None, *, resume: str | None, **options: Any
    ) -> RunJob:
        """Return the run that calls a function."""
        path, values = run_settings(self.settings, function, config, resume=resume, **options)
        return run_job(path, values, resume)

    def to_tune_trainable(
        self, function: Callable[..., Any], *, dataset: Any = None
    ) -> Callable[[dict[str, Any]], None]:
        """Return a trainable for Ray Tune: `tune.Tuner(trainer.to_tune_trainable(train_func), param_space={...})`.

        Each trial is a run with a config of Tune. Its workers are processes on one node, with the resources of this
        Trainer. `report` reports the metrics of rank 0 to Tune, together with `run`, the run's folder, and
        `checkpoint_path`, the newest checkpoint. A trial that Tune restarts continues from its newest checkpoint, in a
        new run. The function's return values are ignored.

        Args:
            function: the same as for `run`.
            dataset: the same as for `run_iterator`, for all trials.

        Raises:
            UsageError: the function takes other arguments, or this Trainer has another engine than `local`.
        """
        if self._cfg.engine not in ("auto", "local"):
            text = "trials of Ray Tune have their workers on one node; leave out engine, or use sweep()"
            raise UsageError(f"engine is {self._cfg.engine!r}, but {text}")
        path, values = run_settings({**self.settings, "engine": "local"}, function, None, dataset=dataset)
        from mlx_runtime.companions.notebook.tuning import tune_trainable

        return tune_trainable(path, values, self._cfg, partial(_start_trial, path))

    @property
    def latest_run(self) -> Run:
        """The latest run, as returned by `open_run`.

        Raises:
            UsageError: no run was started.
        """
        return open_run(self._latest_folder.location)

    @property
    def latest_run_dir(self) -> str:
        """Path or URI of the latest run."""
        return self._latest_folder.location

    @property
    def logdir(self) -> str:
        """Path or URI of the folder that contains the latest run and others of the same name."""
        return join_path(self._latest_folder.root, self._latest_folder.experiment)

    @property
    def latest_checkpoint_dir(self) -> str:
        """Path or URI of the folder with the checkpoints of the latest run."""
        return self._latest_folder.checkpoints

    @property
    def _latest_folder(self) -> RunFolder:
        if self._latest is None:
            raise UsageError("this Trainer has not run a function yet")
        return resolve_run(self._latest.folder)

    @property
    def latest_checkpoint_path(self) -> str | None:
        """Path or URI of the newest checkpoint of the latest run, or None."""
        latest = self.latest_run.record.get("latest")
        return None if latest is None else str(latest["path"])

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The values in the newest checkpoint of the latest run, or None."""
        run = self.latest_run
        return run.state()["own"]["saved"] if run.record.get("latest") is not None else None

    # -- objects

    def start(self, cls: type | None = None, *args: Any, **kwargs: Any) -> None:
        """Create an object on every worker, to stay there until `shutdown`. Needs the engine `ray`.

        The workers are actors of Ray in one placement group; `torch.distributed` is set up, and `world_rank` works.
        Without a class, this does nothing, because runs start their own workers.

        Args:
            cls: class of the objects.
            args: positional arguments of its constructor.
            kwargs: keyword arguments of its constructor.

        Raises:
            UsageError: the engine is `local`, or `cls` is not a class.
            ClusterError: Ray does not start, or has no room.
            WorkerLoopError: the constructor raised an exception.
        """
        if cls is None:
            return
        if not isinstance(cls, type):
            raise UsageError(f"start({cls!r:.60}) takes a class, and then the arguments of its constructor")
        if self._cfg.engine == "local":
            raise UsageError(f"workers of the engine local do not keep a {cls.__name__}; use Trainer(engine='ray')")
        if self._cfg.backend != "torch":
            raise UsageError(f"a {cls.__name__} that stays on workers has only the backend 'torch'; leave out backend=")
        if self._address is not None:
            raise UsageError(f"a {cls.__name__} stays on workers only in a script on the cluster; leave out address=")
        self.shutdown()
        self._actors = Actors(self._cfg, cls, args, kwargs)

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(object, ...)` on every worker with the object that `start` created; return values by rank.

        Raises:
            UsageError: `start` was not called with a class.
            WorkerLoopError: the function raised an exception. If other workers still wait for the failed one after five
                seconds, all are shut down.
        """
        return self._require_actors("execute").call(function, args, kwargs)

    def execute_single(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function(object, ...)` on rank 0 only, and return its value."""
        return self._require_actors("execute_single").call(function, args, kwargs, single=True)[0]

    def shutdown(self) -> None:
        """End the workers that `start` has created, and Ray if it was started for them."""
        if self._actors is not None:
            self._actors.close()
        self._actors = None

    def _require_actors(self, name: str) -> Actors:
        if self._actors is None or self._actors.closed:
            raise UsageError(f"{name} needs the objects of start(cls, ...), which was not called or is shut down")
        return self._actors

    def __str__(self) -> str:
        cfg, cpus, gpus, where = self._cfg, float(os.cpu_count() or 1), float(torch.cuda.device_count()), "this machine"
        ray, embedded = sys.modules.get("ray"), self._actors is not None and JOB_FLAG not in os.environ
        if self._engine == "ray" and ray is not None and ray.is_initialized() and not embedded:
            total = ray.cluster_resources()
            cpus, gpus, where = total.get("CPU", 0), total.get("GPU", 0), "the cluster"
        used = {"CPUs": (cfg.cpus_per_worker, cpus), "GPUs": (cfg.gpus_per_worker * uses_gpus(cfg, gpus), gpus)}
        workers = f"{cfg.start_workers} worker{'s' * (cfg.start_workers != 1)}"
        rows = [
            {"": name, "per worker": f"{each}", workers: f"{each * cfg.start_workers}", where: f"{there:g}"}
            for name, (each, there) in used.items()
        ]
        table = io.StringIO()
        print_table(rows, table)
        return f"Trainer with {workers}, engine {self._engine}, backend {cfg.backend}\n{table.getvalue()}".rstrip()


def reattach(
    run: str | Path, *, address: str, callbacks: Sequence[Any] = (), show: bool = True
) -> FunctionRun | Training:
    """Follow a run that was started with `address=` or by `Trainer.launch`, from its first results.

        for results in reattach("train_func/run_003", address="http://head:8265"):
            print(results[0]["loss"])

    Leaving the loop stops the run, as for an iterator that started it.

    Args:
        run: `name/run_003`, or the path or URI of its folder on the cluster.
        address: dashboard of its cluster.
        callbacks: those of `Trainer.run_iterator`, or listeners of `mlx_runtime.run` for an experiment.
        show: the same as for `mlx_runtime.run`.

    Raises:
        UsageError: the cluster does not know such a run.
        ClusterError: the cluster does not answer, or refuses the token.
    """
    remote = cluster_runs.find(run, address)
    job = RunJob("", "Experiment", Request(), (), remote.function, address)
    if remote.function:
        return FunctionRun(job, [_handler(item) for item in callbacks], show, remote)
    return Training(job, callbacks, show, remote)


def run_job(path: str, values: Mapping[str, Any], resume: str | None = None) -> RunJob:
    """Return the run of a function, by its import path and the settings below `cfg`."""
    fresh = ["~cfg.config"] if resume == "auto" else []  # otherwise, it would be merged into that of the run
    given = [override(f"cfg.{name}", value) for name, value in values.items()]
    request = Request((*fresh, *given), resume=resume)
    adapter = FunctionExperiment.__module__, FunctionExperiment.__name__
    return RunJob(*adapter, request, tuple(sys.orig_argv), path)


def _check_type(name: str, value: Any, annotation: Any, taker: str) -> None:
    try:
        convert(value, annotation)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; {taker} takes {type_name(annotation)}") from None


def _start_trial(path: str, values: Mapping[str, Any]) -> FunctionRun:
    return FunctionRun(run_job(path, values), (), show=False)


def _handler(callback: Any) -> Callable[[Results], object]:
    handle = getattr(callback, "handle_result", callback)
    if isinstance(callback, type) or not callable(handle):
        raise UsageError(f"callbacks takes functions, or objects with handle_result(results), not {callback!r:.60}")
    return handle  # type: ignore[no-any-return]
