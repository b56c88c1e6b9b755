"""What a run tells the objects that listen to it: `cfg.trackers`, beside rank 0, and `cfg.callbacks`, in the driver.

Such an object is any class of yours that has some of these methods; there is nothing to inherit. Its constructor is
called on every worker and should only keep its arguments; what is opened is opened in `on_run_start`.

    on_run_start(run)             before worker_loop, again after each restart; `run` is a `RunInfo`
    on_report(report)             numbers were recorded; a `Report`
    on_epoch_end(epoch, values)   an epoch has ended: its last value of each number
    on_checkpoint(checkpoint)     one is stored: a dict of path, epoch, finished, step and metrics
    on_exception(error)           what ends the run early: its exception
    on_run_end(status, metrics)   SUCCEEDED, FAILED or STOPPED, and the latest value of each number

Trackers are called where the numbers are, so that none is late: in the worker of rank 0, `on_checkpoint` in its thread
that stores checkpoints. Callbacks are called in the driver, which sees what happens to every worker, lost ones too.
What a method raises is told once and never ends the training.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.errors import RAISED_BY_USERS, first_line


@dataclass(frozen=True)
class RunInfo:
    """The run that something listens to.

    Attributes:
        experiment, name: like `digits`, `run_003`.
        folder: on this machine; files written here are stored with the run.
        place: where the run is stored: the same folder, or the URI of another.
        config: conf.yaml of the run, as plain dicts.
        attempt: how often the run was begun; more than 1 when it goes on.
    """

    experiment: str
    name: str
    folder: Path
    place: str
    config: Mapping[str, Any]
    attempt: int


@dataclass(frozen=True)
class Report:
    """Numbers that were recorded together.

    Attributes:
        step: global step, the x axis.
        epoch: as user code counts them, from 0.
        values: like `{"train/loss": 0.3, "lr/adam": 0.001}`.
        facts: when and where: `training_iteration` (number of the report in this run), `timestamp` (seconds since
            1970), `date` (UTC), `time_this_iter_s` (since the report before), `time_total_s` (of training, in all
            attempts), `hostname`, `node_ip`, `pid`.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    facts: Mapping[str, Any]


class Listeners:
    """Calls the methods that objects have, and tells what goes wrong there once.

    Args:
        objects: by name.
        kind: what they are called in conf.yaml: `trackers` or `callbacks`.
        tell: takes a line about one that fails.
    """

    def __init__(self, objects: Mapping[str, Any], kind: str, tell: Callable[[str], None]) -> None:
        self._objects = {name: item for name, item in objects.items() if item is not None}
        self._kind, self._tell = kind, tell
        self._failed: set[str] = set()
        self._calling = threading.RLock()  # checkpoints are told about from a thread of their own

    def __iter__(self) -> Any:
        return iter(self._objects.values())

    def wants(self, hook: str) -> bool:
        """Whether any of them has this method."""
        return any(hasattr(item, hook) for item in self._objects.values())

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a method of all that have it. One that cannot start is left out from then on."""
        with self._calling:
            for name, item in list(self._objects.items()):
                method = getattr(item, hook, None)
                if method is None:
                    continue
                try:
                    method(*arguments)
                except RAISED_BY_USERS as error:
                    left_out = hook == "on_run_start"
                    if left_out:
                        del self._objects[name]
                    if name not in self._failed:
                        self._failed.add(name)
                        then = "the run goes on without it" if left_out else "the run goes on"
                        why = f"{type(error).__name__}: {first_line(error)}"
                        self._tell(f"cfg.{self._kind}.{name} failed in {hook}, {then}: {why}")
