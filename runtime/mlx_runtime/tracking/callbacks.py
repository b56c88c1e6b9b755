"""Hooks of trackers and callbacks: `cfg.trackers` are called on rank 0, `cfg.callbacks` in the driver.

Any class with some of these methods will do; there is no base class. Its constructor runs on every worker and should
only store its arguments; open files and connections in `on_run_start`.

    on_run_start(run)             before worker_loop, again after each restart; `run` is a `RunInfo`
    on_report(report)             numbers were recorded; a `Report`
    on_epoch_end(epoch, values)   an epoch has ended; the last value of each metric
    on_checkpoint(checkpoint)     a checkpoint was stored; a dict of path, epoch, finished, step and metrics
    on_exception(error)           an exception has ended the run
    on_run_end(status, metrics)   SUCCEEDED, FAILED or STOPPED, and the latest value of each metric; if a sweep prunes
                                  the run, trackers receive STOPPED and callbacks PRUNED
    on_rewind(step)               trackers only: training resumes from this step; discard later numbers

Callbacks only, in every worker; `stage` is the name of the pass, like `train`:

    on_batch_start(experiment, stage, batch)  before the loop receives a batch
    on_batch_end(experiment, stage, batch)    when the loop requests the next batch; not after `break`
    on_update(experiment, optimizer)          after an optimizer has stepped; the gradients are still there
    on_evaluate_start(experiment, stage)      before the first batch of a pass over an evaluation dataset
    on_evaluate_end(experiment, stage)        after the last batch, or when the loop leaves the pass

Callbacks only, in the driver:

    accompany(run)                            a context manager around the run; see `driver.planning.RunExtension`

A tracker that writes files to the run folder lists them in an attribute `files`, a tuple of patterns like `*.csv`, so
that they reach an object store. With `append_only = True`, they are truncated to the checkpoint before `on_rewind`.

Trackers are called without delay on rank 0, `on_checkpoint` in the thread that stores checkpoints. Callbacks are
called in the driver, which knows about all workers, even lost ones. Those with methods for workers have a separate
object in each worker, which shares nothing with the one in the driver. An exception in a method is reported once and
never ends the run.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlx_runtime.errors import USER_ERRORS, UsageError, located
from mlx_runtime.events import CheckpointSaved, EpochEnded, Event, Report, RunEnded, RunInfo, RunStarted

__all__ = ["Listeners", "Report", "RunInfo"]

_HOOKS = ("on_run_start", "on_report", "on_epoch_end", "on_checkpoint", "on_exception", "on_run_end")
_IN_WORKERS = ("on_batch_start", "on_batch_end", "on_update", "on_evaluate_start", "on_evaluate_end")

HOOKS = {"trackers": (*_HOOKS, "on_rewind"), "callbacks": (*_HOOKS, *_IN_WORKERS, "accompany")}
"""Methods that are called, by key in `cfg`."""


class Listeners:
    """Calls the hooks of several objects by name, and reports the first failure of each with `notify`; of
    `UsageError`s, each message.

    `kind` is the key in `cfg`: `trackers` or `callbacks`.
    """

    def __init__(self, objects: Mapping[str, Any], kind: str, notify: Callable[[str], None]) -> None:
        self._objects = {name: item for name, item in objects.items() if item is not None}
        self._kind, self._notify = kind, notify
        self._failed: set[str] = set()  # names of objects, and messages of `UsageError`s
        self._calling = threading.RLock()  # checkpoints are reported from another thread

    def __iter__(self) -> Iterator[Any]:
        return iter(self._objects.values())

    def handle(self, event: Event) -> None:
        """Call the hooks for an event."""
        match event:
            case RunStarted(run):
                self.call("on_run_start", run)
            case Report():
                self.call("on_report", event)
            case EpochEnded(epoch, _, values):
                self.call("on_epoch_end", epoch, values)
            case CheckpointSaved():
                self.call("on_checkpoint", dict(vars(event)))
            case RunEnded(status, metrics, _, error):
                if error is not None:
                    self.call("on_exception", error)
                self.call("on_run_end", status, metrics)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a method of all objects that have it. One that fails in `on_run_start` is not called again."""
        with self._calling:
            for name, item in list(self._objects.items()):
                method = getattr(item, hook, None)
                if method is None:
                    continue
                try:
                    method(*arguments)
                except USER_ERRORS as error:
                    if hook == "on_run_start":
                        del self._objects[name]
                    what = f"{name}: {error}" if isinstance(error, UsageError) else name
                    if what not in self._failed:
                        self._failed.add(what)
                        then = "the run continues" if name in self._objects else "the run continues without it"
                        self._notify(f"cfg.{self._kind}.{name} failed in {hook}, {then}: {located(error)}")


def hooks_in_workers(
    callbacks: Mapping[str, Any], experiment: Any, notify: Callable[[str], None]
) -> Callable[..., None]:
    """Return a function that calls a hook in workers by name. It does nothing if no callback has such hooks."""
    if not any(hasattr(item, hook) for item in callbacks.values() for hook in _IN_WORKERS):
        return lambda hook, *arguments: None
    listeners = Listeners(callbacks, "callbacks", notify)
    return lambda hook, *arguments: listeners.call(hook, experiment, *arguments)
