"""Data jobs: parallel work, on a cluster or on this machine, that fills one folder in the storage."""

import contextlib
import itertools
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_runtime import companions
from mlx_runtime.companions.jobs import filling
from mlx_runtime.companions.jobs.filling import JOBS, Filling, Output
from mlx_runtime.companions.jobs.items import FinishedItems, fingerprints, interrupted
from mlx_runtime.companions.jobs.options import DataConfig
from mlx_runtime.config.building import build
from mlx_runtime.config.composition import Config
from mlx_runtime.errors import (
    ConfigError,
    DataJobError,
    MlxError,
    RunStopped,
    StorageError,
    full_message,
    short_message,
    user_errors,
)
from mlx_runtime.importing import add_to_path
from mlx_runtime.runs import drivers
from mlx_runtime.runs.folder import claim_run, named_run
from mlx_runtime.runs.logs import Log
from mlx_runtime.runs.records import LAUNCHER_FACTS, Record, attempts, load_record, provenance
from mlx_runtime.runs.tables import plural
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.documents import is_name
from mlx_runtime.storage.files import join_path, size_text, storage_root
from mlx_runtime.storage.redaction import redact
from mlx_runtime.tracking.console import Display
from mlx_runtime.workers.stop_requests import StopRequests, Terminated, interrupt_main, sigterm_stops

MAX_RETRIES = 3  # of a task whose process or node is lost

Item = TypeVar("Item")
Result = TypeVar("Result")


class DataJob:
    """Base class of data jobs. Annotate its groups, and implement `run`:

        class Job(DataJob):
            cfg: JobConfig
            images: Images

            def run(self) -> None: ...

    Groups are built from conf.yaml, like those of an experiment. They may also be arguments of an `__init__` that
    passes them to `super().__init__`.

    Attributes:
        cfg: the settings, a `DataConfig`.
        output: the folder to fill.
    """

    CONFIG = "DataConfig"

    cfg: Any
    output: Output
    _display: Display | None = None
    _finished: FinishedItems | None = None

    def __init__(self, **groups: Any) -> None:
        for name, group in groups.items():
            setattr(self, name, group)

    def run(self) -> None:
        """Fill `self.output`, with plain Python, Ray or Ray Data. Called on the driver; implemented by the user."""
        raise NotImplementedError(f"{type(self).__name__} must define run(self)")

    def map(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        title: str = "done",
        key: Callable[[Item], object] | None = None,
    ) -> list[Result]:
        """Call a function with each item, `cfg.start_workers` at a time on any node, and show the progress.

        Starting a call takes milliseconds, so an item should take a second or more. If its process or node is lost, an
        item is retried; write files atomically, as `self.output.write` does.

        Args:
            function: a method or function; it and its items must be picklable. With `key`, it is a method of the job.
            items: arguments of the calls.
            title: title of the progress bar.
            key: function that returns the text that identifies an item in the whole job, like `str`. With it, a job
                that is resumed keeps the results and the files of finished items. Pass it only if calls that are
                repeated, in any order, have the same effect.

        Returns:
            The results, in the order of the items.

        Raises:
            DataJobError: a call raised an exception, and no further calls are started; or there is a `key`, and the
                function is no method of the job.
            MlxError: the process or node of an item was lost too many times.
        """
        if key is not None and getattr(function, "__self__", None) is not self:  # its files are unknown
            name = getattr(function, "__name__", str(function))
            raise DataJobError(f"self.map({name}, ..., key=...) needs a method of the job, like self.work")
        items = list(items)
        keys = [str(key(item)) for item in items] if key is not None else []
        known = self._finished.results(keys) if self._finished is not None else {}
        results: list[Any] = [known.get(index) for index in range(len(items))]
        calls = _calls_here if self.cfg.start_workers == 0 else _calls_on_ray
        waiting = [(index, item) for index, item in enumerate(items) if index not in known]
        with contextlib.closing(calls(function, waiting, self.cfg)) as finished:
            for count, (index, result, files) in enumerate(finished, start=len(known) + 1):
                results[index] = result
                if self._finished is not None:
                    self._finished.add(keys[index] if keys else None, result, files)
                if self._display is not None:
                    self._display.show_progress(title, count, len(items))
        return results

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for tasks, without the objects that remain on the driver."""
        return {name: value for name, value in vars(self).items() if name not in ("_display", "_finished")}


def run_job(job: type[DataJob], config: Config) -> str:
    """Run a data job, and publish its output on success.

    Args:
        job: class of the job, importable by name.
        config: the checked config, from `load_config`.

    Returns:
        The folder or URI of the output.

    Raises:
        ConfigError: `cfg` is not a `DataConfig`, `cfg.path` lies outside the storage, or no node has room for a task.
        UsageError: the folder exists, or another job is filling it.
        StorageError: the storage cannot be written.
        DataJobError: user code raised an exception.
        RunStopped: Ctrl-C or SIGTERM.
    """
    cfg: Any = config.cfg
    if not isinstance(cfg, DataConfig):
        raise ConfigError(f"cfg is a {type(cfg).__name__}; a data job needs class JobConfig(mlx_runtime.DataConfig)")
    path, started = output_path(cfg), time.monotonic()
    refuse_present(config)  # before there is a record
    with _tasks(cfg) as tasks, _recorded(config, path) as (record, display):
        display.print(f"job       {record.folder.experiment} {record.folder.name}")
        display.print(f"folder    {path}")
        display.print(f"workers   {tasks}")
        facts = provenance(config.overrides)
        facts |= {"name": cfg.name, "config": config.shown, "start": documents.now(), "job": Settings.read().job}
        adopt = record["filling"] if cfg.resume else None
        with Filling(path, overwrite=cfg.overwrite, adopt=adopt, **facts) as target, contextlib.ExitStack() as stack:
            finished: FinishedItems | None = None
            try:
                record.update(filling=target.id, **fingerprints(config))
                finished = FinishedItems(record.folder, target.output, resumed=target.adopted)
                stack.callback(finished.close)
                if cfg.resume:
                    display.print(f"resumed   {plural(finished.count, 'finished item')}")
                instance = job(**{name: build(node, name) for name, node in config.tree.items()})
                instance.output, instance._display, instance._finished = target.output, display, finished
                with _user_errors(f"{job.__name__}.run"):
                    instance.run()
                finished.complete()
                files, size = target.commit()
            except BaseException:
                count = finished.count if finished is not None else 0
                target.kept = bool(count or (finished is None and target.adopted))
                if count:
                    typed = [item for item in facts["overrides"] if not item.startswith("cfg.resume=")]
                    again = shlex.join(["mlx", "data", "launch" if Settings.read().job else "run", "--resume", *typed])
                    display.print(f"kept      {plural(count, 'finished item')}; to continue: {again}")
                raise
        record.note(files=files, size_bytes=size)
        display.print()
        display.print(f"took      {time.monotonic() - started:.1f} s")
        display.print(f"wrote     {files:,} file{'s' * (files != 1)}, {size_text(size)}")
        display.print(f"folder    {path}", always=True)
    return path


@contextlib.contextmanager
def _tasks(cfg: DataConfig) -> Iterator[str]:
    """Start Ray for the tasks of a job, or join the cluster that the job runs on. Yield where they run."""
    if cfg.start_workers == 0:
        yield "0: in this process"
        return
    with companions.part("ray.start").tasks_on_ray(cfg) as place:
        yield f"{cfg.start_workers} task{'s' * (cfg.start_workers != 1)} at a time {place}"


@contextlib.contextmanager
def _recorded(config: Config, path: str) -> Iterator[tuple[Record, Display]]:
    """Record a job and its output while the block runs, which requests to stop interrupt."""
    control = StopRequests(interrupt_main)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_stops(control))
        record = _claim(config, path)
        stack.enter_context(record.alive())
        log = stack.enter_context(Log(record.folder))
        display = Display(log.screen, log.write, quiet=Settings.read().quiet)
        stack.callback(display.close)
        try:
            with control.watch(record.folder, record["attempt"]):
                record.begin(config.yaml())
                yield record, display
        except KeyboardInterrupt as interrupt:
            record.finish("STOPPED")
            code = control.exit_code if isinstance(interrupt, Terminated) else 130
            raise RunStopped(f"stopped; {path} was not created", code) from None
        except (MlxError, OSError) as error:
            text = full_message(error)
            if isinstance(error, OSError):
                text = f"cannot write {path}: {error.strerror or short_message(error)}"
            with contextlib.suppress(StorageError):  # it may be what failed
                record.finish("FAILED", error=redact(text))
            log.write(f"error: {text}\n")
            if isinstance(error, OSError):
                raise StorageError(text) from error
            raise
        record.finish("SUCCEEDED")


def _claim(config: Config, path: str) -> Record:
    """Create the record of a job, or continue that of its launch."""
    facts = provenance(config.overrides) | {"status": "RUNNING", "start": documents.now(), "output": path}
    claimed, folder = os.environ.get("MLX_DATA_JOB"), interrupted(config, path) if config.cfg.resume else None
    if claimed:
        folder = named_run(claimed, "", "")
        facts = {name: value for name, value in facts.items() if name not in LAUNCHER_FACTS}
    if folder is None:
        folder = claim_run(join_path(storage_root(config.cfg.storage_path), JOBS), config.cfg.name)
        folder.claim_attempt(1, leases.lease())
        return Record(folder, **facts, attempt=1)
    attempt, before = drivers.take_over(folder), load_record(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not claimed:
        facts |= {"attempts": attempts(before), "job": None}
    return Record(folder, before, **facts, attempt=attempt)


def refuse_present(config: Config) -> None:
    """Reject a data job whose folder exists or is being filled, before starting anything."""
    path = output_path(config.cfg)
    try:
        filling.refuse_present(path, overwrite=config.cfg.overwrite)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {short_message(error)}") from error


def output_path(cfg: DataConfig) -> str:
    """Return the folder or URI of a data job's output, which must be below the storage."""
    path = Path(cfg.path if cfg.path is not None else f"data/{cfg.name}")
    if path.is_absolute() or not path.parts or not all(map(is_name, path.parts)):
        raise ConfigError(
            f"cfg.path is {str(path)!r}; it must be a folder below the storage, like data/{cfg.name}, without parts "
            "that start with a dot or dash, and without \\, ?, # and unprintable characters"
        )
    return join_path(storage_root(cfg.storage_path), *path.parts)


Results = Generator[tuple[int, Any, list[str] | None], None, None]
"""Index of an item, the result of its call, and the files that it wrote, in the order in which calls finish.

The files are None if they are not known.
"""


def _calls_here(function: Callable[[Any], Any], items: Sequence[tuple[int, Any]], cfg: DataConfig) -> Results:
    for index, item in items:
        with _user_errors(_item_title(item)):
            result, files = _call_tracked(function, item)
        yield index, result, files


def _call_tracked(function: Callable[[Any], Any], item: Any) -> tuple[Any, list[str] | None]:
    """Call a function. Return its result, and the files that it has written to the output of its job."""
    output = getattr(getattr(function, "__self__", None), "output", None)
    if not isinstance(output, Output):
        return function(item), None
    before, output.written, output.opaque = (output.written, output.opaque), [], False
    try:
        return function(item), None if output.opaque else output.written
    finally:
        output.written, output.opaque = [*before[0], *output.written], before[1] or output.opaque


def _calls_on_ray(function: Callable[[Any], Any], items: Sequence[tuple[int, Any]], cfg: DataConfig) -> Results:
    """Call a function in tasks of Ray, at most `cfg.start_workers` at a time."""
    import ray
    from ray import cloudpickle

    gpus = {"num_gpus": 1} if cfg.use_gpu else {}
    task = ray.remote(_call).options(num_cpus=cfg.cpus_per_worker, max_retries=MAX_RETRIES, **gpus)
    pickled = ray.put(cloudpickle.dumps(function))
    waiting = iter(items)
    running: dict[Any, tuple[int, str]] = {}
    try:
        while True:
            for index, item in itertools.islice(waiting, cfg.start_workers - len(running)):
                title = _item_title(item)
                running[task.remote(str(Path.cwd()), pickled, cloudpickle.dumps(item), title)] = (index, title)
            if not running:
                return
            ready, _ = ray.wait(list(running), timeout=1)  # signals are only handled between calls
            for ref in ready:
                index, title = running.pop(ref)
                yield index, *_task_result(ref, title)
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def _task_result(ref: Any, title: str) -> tuple[Any, list[str] | None]:
    import ray

    try:
        result, files, error = ray.get(ref)
    except ray.exceptions.RayTaskError as unpicklable:  # `_call` returns what user code raises
        cause = short_message(unpicklable.cause)
        raise MlxError(f"the result of {title} cannot be sent to the driver: {cause}") from unpicklable
    except ray.exceptions.RayError as lost:
        cause = f"{type(lost).__name__}: {short_message(lost)}"
        raise MlxError(f"{title} was lost {MAX_RETRIES + 1} times: {cause}") from lost
    if error is not None:
        raise error
    return result, files


def _call(project: str, function: bytes, item: bytes, title: str) -> tuple[Any, list[str] | None, MlxError | None]:
    """Call a pickled function in a process of Ray. Return its result and files, or the error for the user."""
    add_to_path(Path.cwd() if Path("src").is_dir() else Path(project))  # each node of a cluster has its own copy
    from ray import cloudpickle

    try:
        with _user_errors(title):
            return *_call_tracked(cloudpickle.loads(function), cloudpickle.loads(item)), None
    except MlxError as error:
        return None, None, error


def _item_title(item: Any) -> str:
    return f"item {item!r:.80}"


def _user_errors(during: str) -> contextlib.AbstractContextManager[None]:
    """Convert exceptions of user code to a `DataJobError` with the user's frames."""

    def translate(error: BaseException, summary: str, trace: str) -> DataJobError:
        return DataJobError(f"{summary} (in {during})\n{trace}".rstrip())

    return user_errors(Path.cwd(), translate)
