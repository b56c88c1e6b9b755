"""A data job: arbitrary work, in parallel on a cluster or here, that fills one folder of the storage."""

import contextlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_runtime import filling, registry
from mlx_runtime.cluster import Cluster
from mlx_runtime.config import DataConfig
from mlx_runtime.control import Terminated
from mlx_runtime.errors import (
    RAISED_BY_USERS,
    ConfigError,
    DataJobError,
    MlxError,
    RunStopped,
    StorageError,
    first_line,
    is_users,
    message_of,
    user_frames,
)
from mlx_runtime.filling import Filling, Output
from mlx_runtime.layout import names_folder, storage_root
from mlx_runtime.loading import Config, build
from mlx_runtime.progress import Display
from mlx_runtime.settings import Settings
from mlx_runtime.storage import joined, size_text

LOST = 3
"""How often a task is tried again whose process or node is lost."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class DataJob:
    """Work that fills a folder of the storage. Inherit, name its groups, and write `run`:

        class Job(DataJob):
            cfg: JobConfig
            images: Images

            def run(self) -> None: ...

    Groups are built from conf.yaml, as those of an experiment are. An `__init__` that takes them and passes them to
    `super().__init__` works just as well.

    Attributes:
        cfg: the settings, a `DataConfig`.
        output: the folder to fill.
    """

    CONFIG = "DataConfig"

    cfg: Any
    output: Output
    _display: Display | None = None

    def __init__(self, **groups: Any) -> None:
        for name, group in groups.items():
            setattr(self, name, group)

    def run(self) -> None:
        """Do the work, in plain Python, Ray or Ray Data; runs on the driver. Written by the user."""
        raise NotImplementedError(f"{type(self).__name__} needs a run(self)")

    def map(self, function: Callable[[Item], Made], items: Iterable[Item], title: str = "done") -> list[Made]:
        """Call a function with each item, `cfg.start_workers` at a time on any node, and show how far that is.

        A call takes milliseconds to get to its process, so let an item be work for a second or more. An item whose
        process or node is lost is tried again; write files whole, as `self.output.write` does.

        Args:
            function: a method or function; it and its items travel pickled.
            items: what to call it with.
            title: for the progress lines.

        Returns:
            What the calls returned, in the order of the items.

        Raises:
            DataJobError: a call raised; no others are begun.
            MlxError: an item was lost again and again.
        """
        todo = list(items)
        made: list[Any] = [None] * len(todo)
        calls = _calls_here if self.cfg.start_workers == 0 else _calls_on_ray
        with contextlib.closing(calls(function, todo, self.cfg)) as results:
            for done, (index, result) in enumerate(results, start=1):
                made[index] = result
                if self._display is not None:
                    self._display.counting(title, done, len(todo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without the display, which is the driver's."""
        return {name: value for name, value in vars(self).items() if name != "_display"}


def run_job(job: type[DataJob], config: Config, cluster: Cluster) -> str:
    """Run a data job: make its output, let it fill that, and make it count.

    Args:
        job: its class, importable by name.
        config: checked, from `load_config`.
        cluster: from `connect`.

    Returns:
        The folder or URI that it filled.

    Raises:
        ConfigError: `cfg` is not a `DataConfig`, or `cfg.path` lies outside the storage.
        UsageError: the folder is there already, or another job is filling it.
        StorageError: the storage cannot be written.
        DataJobError: user code raised.
        RunStopped: Ctrl-C or SIGTERM.
    """
    cfg: Any = config.cfg
    if not isinstance(cfg, DataConfig):
        raise ConfigError(f"cfg is a {type(cfg).__name__}; a data job wants class JobConfig(mlx_runtime.DataConfig)")
    place, display, started = place_of(cfg), Display(sys.stdout), time.monotonic()
    display.print(f"job       {cfg.name}")
    display.print(f"folder    {place}")
    tasks = f"{cfg.start_workers} task{'s' * (cfg.start_workers != 1)} at a time {cluster.title}"
    display.print(f"workers   {tasks if cfg.start_workers else '0: in this process'}")
    facts = registry.provenance(config.overrides) | {"name": cfg.name, "config": config.shown, "start": registry.now()}
    facts["job"] = Settings.read().job
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        stack.enter_context(_terminable())
        target = stack.enter_context(_filled(place, overwrite=cfg.overwrite, **facts))
        groups = {name: build(node, name) for name, node in config.tree.items()}
        made = job(**groups)
        made.output, made._display = target.output, display
        with _user_errors(f"{job.__name__}.run"):
            made.run()
        files, size = target.commit()
    display.print()
    display.print(f"took      {time.monotonic() - started:.1f} s")
    display.print(f"wrote     {files:,} file{'s' * (files != 1)}, {size_text(size)}")
    display.print(f"folder    {place}")
    return place


def refuse_present(config: Config) -> None:
    """Refuse a job whose folder is there already or being filled, before anything is started for it.

    Raises:
        ConfigError: `cfg.path` lies outside the storage.
        UsageError: it says what is there, and what to do.
        StorageError: the storage does not answer.
    """
    cfg: Any = config.cfg
    place = place_of(cfg)
    try:
        filling.refuse_present(place, overwrite=cfg.overwrite)
    except OSError as error:
        raise StorageError(f"cannot read {place}: {first_line(error)}") from error


def place_of(cfg: DataConfig) -> str:
    """The folder or URI that a job fills.

    Raises:
        ConfigError: it is not a folder below the storage.
    """
    path = Path(cfg.path if cfg.path is not None else f"data/{cfg.name}")
    if path.is_absolute() or not path.parts or not all(map(names_folder, path.parts)):
        raise ConfigError(
            f"cfg.path is {str(path)!r}; it must be a folder below the storage, like data/{cfg.name}, with no part "
            "that begins with a dot or holds ? or # or what does not print"
        )
    return joined(storage_root(cfg.storage_path), *path.parts)


Results = Generator[tuple[int, Any], None, None]


def _calls_here(function: Callable[[Any], Any], items: Sequence[Any], cfg: DataConfig) -> Results:
    for index, item in enumerate(items):
        with _user_errors(_named(item)):
            result = function(item)
        yield index, result


def _calls_on_ray(function: Callable[[Any], Any], items: Sequence[Any], cfg: DataConfig) -> Results:
    """The results of calls as they come, at most `cfg.start_workers` under way."""
    import ray
    from ray import cloudpickle

    gpus = {"num_gpus": 1} if cfg.use_gpu else {}
    task = ray.remote(_called).options(num_cpus=cfg.cpus_per_worker, max_retries=LOST, **gpus)
    pickled = ray.put(cloudpickle.dumps(function))
    waiting = deque(enumerate(items))
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < cfg.start_workers:
                index, item = waiting.popleft()
                running[task.remote(str(Path.cwd()), pickled, cloudpickle.dumps(item), _named(item))] = (index, item)
            ready, _ = ray.wait(list(running), timeout=1)  # not for ever: signals are only heard between calls
            for reference in ready:
                index, item = running.pop(reference)
                try:
                    result, error = ray.get(reference)
                except ray.exceptions.RayTaskError as refused:  # `_called` raises nothing: Ray could not pickle
                    message = f"the result of {_named(item)} cannot be sent to the driver: {first_line(refused.cause)}"
                    raise MlxError(message) from refused
                except ray.exceptions.RayError as lost:
                    kind = type(lost).__name__
                    raise MlxError(f"{_named(item)} was lost {LOST + 1} times: {kind}: {first_line(lost)}") from lost
                if error is not None:
                    raise error
                yield index, result
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _called(project: str, pickled: bytes, item: bytes, name: str) -> tuple[Any, MlxError | None]:
    """One call, in a process of Ray's: its result, or what to tell the user."""
    here = Path.cwd() if Path("src").is_dir() else Path(project)  # each node has a copy of its own
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    from ray import cloudpickle

    try:
        with _user_errors(name):
            return cloudpickle.loads(pickled)(cloudpickle.loads(item)), None
    except MlxError as error:
        return None, error


def _named(item: Any) -> str:
    return f"item {item!r:.80}"


@contextlib.contextmanager
def _user_errors(during: str) -> Iterator[None]:
    """Turn what user code raises into one error with the user's frames."""
    try:
        yield
    except RAISED_BY_USERS as error:
        if isinstance(error, MlxError) and not is_users(error, Path.cwd()):
            raise
        summary = f"{type(error).__name__}: {message_of(error)} (in {during})"
        raise DataJobError(summary, user_frames(error, Path.cwd())) from None


@contextlib.contextmanager
def _filled(place: str, *, overwrite: bool, **facts: Any) -> Iterator[Filling]:
    """A folder to fill while the block runs, with errors for people."""
    try:
        with Filling(place, overwrite=overwrite, **facts) as target:
            yield target
    except OSError as error:
        raise StorageError(f"cannot write {place}: {error.strerror or first_line(error)}") from error
    except KeyboardInterrupt as interrupt:
        code = 143 if isinstance(interrupt, Terminated) else 130
        raise RunStopped(f"stopped; {place} was not made", code) from None


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the job as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
