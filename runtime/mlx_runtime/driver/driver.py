"""The driver of one run: it claims the folder, starts the workers, follows their events, and records the outcome."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from mlx_runtime import companions, events
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.driver.planning import AccompaniedRun, Listener, RunExtension, RunPlan, may_be_prepared
from mlx_runtime.driver.run_recorder import RunRecorder, claim
from mlx_runtime.errors import USER_ERRORS, MlxError, StorageError, located, short_message
from mlx_runtime.loop.job import LOCATE, STOP, Inbox, Job
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.tracking.callbacks import Listeners
from mlx_runtime.workers.stop_requests import StopRequests, Terminated

if TYPE_CHECKING:
    from mlx_runtime.companions.prepared.store import PreparedSet
    from mlx_runtime.workers.deadlocks import DeadlockDetector

SLOW_START_S = 2.0
"""Time after which a line says that workers are starting."""


class Driver:
    """Trains one run, and yields its events.

    A driver installs no signal handlers, prints nothing and may run in any thread, so commands, notebooks, sweeps and
    tests can all use it:

        config = load_config(Experiment)
        with connect(config.cfg) as cluster, prepare_run(Experiment, config, cluster) as plan:
            driver = Driver(plan)
            for event in driver.run():
                match event:
                    case EpochEnded(epoch, values=values) if values["val/loss"] > 2:
                        driver.stop("no progress")

    Args:
        plan: plan of the run, from `prepare_run`.
        listeners: called with each event, in the driver's thread.
        control: determines when the run ends early.
        guard: entered before the record marks the run as alive, and exited when the outcome is about to be recorded.
    """

    def __init__(
        self,
        plan: RunPlan,
        listeners: Sequence[Listener] = (),
        *,
        control: StopRequests | None = None,
        guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.control = control or StopRequests()
        self.recorder: RunRecorder | None = None  # set when the run is claimed
        self.stopped = False  # the run ends because of an interrupt
        self._plan, self._guard = plan, guard
        callbacks = Listeners(plan.config.cfg.callbacks, "callbacks", lambda text: self._emit(events.Notice(text)))
        self._listeners: list[Listener] = [*listeners, callbacks.handle]
        self._emitting = threading.RLock()  # because without workers, another thread reports checkpoints
        self._sent: deque[events.Event] = deque()  # by extensions, in any thread
        self._unread: deque[events.Event] = deque()
        self._stop_announced = self._interrupted = self._outage = False

    @property
    def folder(self) -> RunFolder:
        """Folder of the run, once it has been claimed."""
        assert self.recorder is not None
        return self.recorder.record.folder

    @property
    def resuming(self) -> bool:
        """True while a run to resume is still unchanged."""
        return self.recorder is not None and self.recorder.record.held

    def stop(self, reason: str = "stop()") -> None:
        """End the run, after a checkpoint if workers train. May be called from any thread."""
        self.control.request(reason)

    def prune(self, reason: str = "prune()") -> None:
        """End the run like `stop`, but mark it PRUNED: it is resumed only if a user names it."""
        self.control.request(reason, prune=True)

    def run(self) -> Iterator[events.Event]:
        """Train, and yield each event after the listeners have seen it. The last one is `RunEnded`.

        With `cfg.start_workers=0`, the loop runs within `next()`, so its events are yielded after its end; listeners
        get them immediately. Closing the iterator early stops the run without a checkpoint.

        Raises:
            UsageError: another driver is training the run.
            StorageError: the run folder cannot be written.
            WorkerLoopError: user code raised an exception.
            WorkerLostError: workers were lost more than `cfg.elastic.max_failures` times.
            HangError: the workers deadlocked.
        """
        with contextlib.ExitStack() as guard, contextlib.ExitStack() as extensions:
            record = claim(self._plan, lambda: guard.enter_context(self._guard()))
            recorder = self.recorder = RunRecorder(record, self._plan)
            accompanied = AccompaniedRun(record, self.control.request, self._sent.append)
            try:
                with (
                    self.control.watch(record.folder, record["attempt"]),
                    contextlib.ExitStack() as stack,
                    record.alive(),
                ):
                    guard.close()
                    try:
                        for extension in self._plan.extensions:
                            extensions.enter_context(self._accompany(extension, accompanied))
                        yield from self._train(recorder, stack)
                    except (StorageError, KeyboardInterrupt) as error:
                        if record.folder.uri:  # it may take a while
                            why = "" if isinstance(error, KeyboardInterrupt) else f"{short_message(error)}; "
                            self._emit(events.Notice(f"ending    {why}recording the end of the run"))
                        raise
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and self.control.taken_over:
                    raise record.disown() from None
                self.stopped = isinstance(error, KeyboardInterrupt | GeneratorExit)
                status = "FAILED" if not self.stopped else "PRUNED" if self.control.pruned else "STOPPED"
                ended = self._record_end(recorder.end_early, status, error)
                if isinstance(error, GeneratorExit):
                    self._emit(ended)
                    raise
            else:
                ended = self._record_end(recorder.succeed)
            finally:
                accompanied.taken_over = self.control.taken_over
                accompanied.interrupted = accompanied.interrupted or self._interrupted
                extensions.close()
                self._receive()
        self._emit(ended)
        yield from self._take_unread()
        if ended.error is not None and not isinstance(ended.error, Terminated):
            raise ended.error

    @contextlib.contextmanager
    def _accompany(self, extension: RunExtension, run: AccompaniedRun) -> Iterator[None]:
        """Let an extension listen within the block. Its first exception is reported and ends that."""
        listening: list[Listener] = []

        def listen(event: events.Event) -> None:
            for listener in listening:
                with report():
                    listener(event)

        @contextlib.contextmanager
        def report(*raised: type[BaseException]) -> Iterator[None]:
            try:
                yield
            except USER_ERRORS as error:
                if isinstance(error, raised):
                    raise
                listening.clear()
                text = f"{type(extension).__name__} failed, the run continues without it: {located(error)}"
                run.notify(events.WarningNotice(text))

        entered = contextlib.ExitStack()
        with report(MlxError):
            listener = entered.enter_context(extension.accompany(run))
            listening += [listener] if listener is not None else []
        self._listeners.insert(0, listen)
        yield
        with report():
            try:
                entered.close()
            except KeyboardInterrupt:  # exit the others, too, without waiting
                run.interrupted = True
        self._listeners.remove(listen)

    def _record_end(self, end: Callable[..., events.RunEnded], *arguments: Any) -> events.RunEnded:
        try:
            return end(*arguments)
        except KeyboardInterrupt:  # too late to stop the run, but nothing else is waited for
            if self.stopped and self.folder.uri:  # it has been stopped, and the storage may not answer
                raise
            self._interrupted = True
            return end(*arguments)

    def _train(self, recorder: RunRecorder, stack: contextlib.ExitStack) -> Iterator[events.Event]:
        """Prepare the datasets, start the workers, and follow them to the end."""
        plan, config, record = self._plan, self._plan.config, recorder.record
        if not record.held:
            recorder.begin()
        folder, attempt = record.folder, record["attempt"]
        run = events.RunInfo(folder.experiment, folder.name, folder.path, folder.location, config.shown, attempt)
        self._emit(events.RunStarted(run))
        self._receive()
        self._warn_of_leaks()
        sets = self._prepare_datasets(stack)
        yield from self._take_unread()
        self.control.check()
        with contextlib.closing(_inbox(plan)) as receiver:
            job = Job(
                experiment=path_of(plan.experiment),
                tree=config.tree,
                run=run,
                root=folder.root,
                project=plan.project,
                cluster=plan.cluster,
                verbose=plan.verbose,
                prepared=sets,
                subsets=plan.fold.subsets() if plan.fold is not None else {},
                receiver=(receiver.address, receiver.key),
                evaluate=config.checkpoint is not None,
            )
            yield from self.follow(job, receiver, recorder)
        if recorder.stopped:
            raise Terminated

    def _warn_of_leaks(self) -> None:
        if self._plan.fold is None:
            return
        if warning := companions.part("sweeps.folds").leak_warning(self._plan.config.tree):
            self._emit(events.Notice(warning))

    def _prepare_datasets(self, stack: contextlib.ExitStack) -> "dict[str, PreparedSet]":
        """Return the prepared datasets of the run, protected from removal until `stack` is closed."""
        if not may_be_prepared(self._plan.config):
            return {}
        prepared = companions.part("prepared.datasets")
        sets = prepared.prepare_datasets(self._plan.config, self._plan.project, self._emit, stack)
        sets = {name: item for name, item in sets.items() if stack.enter_context(prepared.mark_used(item))}
        if sets:
            names = {name: item.manifest.name for name, item in sets.items()}
            created = max(item.manifest.created for item in sets.values())
            self._emit(events.DatasetsPrepared(names, next(iter(sets.values())).root, created))
        return sets

    def follow(self, job: Job, receiver: Inbox, recorder: RunRecorder) -> Iterator[events.Event]:
        """Start the workers, and yield their events until they are done."""
        deadlocks = None if self._plan.cluster.in_driver else self._deadlocks(receiver)
        look_at, announced, stop_sent, missing = time.monotonic() + SLOW_START_S, False, False, None
        self.control.allow_checkpoint()
        with contextlib.ExitStack() as stack:
            group = self._plan.engine.start(job, self._emit, self._stop_requested)
            stack.callback(group.close)
            try:
                while group.poll():
                    for event in receiver.events(timeout_s=0.1):
                        self._emit(event)
                        if deadlocks is not None:
                            deadlocks.handle(event)
                        stop_sent = stop_sent and not isinstance(event, events.WorkerConnected)  # it is new
                    if recorder.trains:
                        look_at = time.monotonic() + SLOW_START_S
                    elif time.monotonic() > look_at:
                        waited, missing, look_at = missing, group.waits_for(), time.monotonic() + SLOW_START_S
                        if missing and missing != waited:
                            self._emit(events.WorkersWaiting(missing))
                        elif not missing and not announced:
                            self._emit(events.Notice("starting  workers"))
                            announced = True
                    if missing and not recorder.trains and self._stop_requested():
                        raise Terminated  # no worker can save a checkpoint
                    self.control.check()
                    self._announce_outage()
                    if self._stop_requested() and not stop_sent:
                        receiver.broadcast(STOP)
                        stop_sent = True
                    if deadlocks is not None:
                        deadlocks.check(recorder.world_size)
                    self._receive()
                    yield from self._take_unread()
                for event in receiver.drain():
                    self._emit(event)
            except MlxError:  # the record needs the events that workers sent before they failed
                stack.close()  # ends local workers, so that `drain` does not wait for them
                for event in receiver.drain():
                    self._emit(event)
                raise

    def _deadlocks(self, receiver: Inbox) -> "DeadlockDetector":
        from mlx_runtime.workers.deadlocks import DeadlockDetector

        detector = DeadlockDetector(lambda: receiver.broadcast(LOCATE), self._plan.config.cfg.elastic.hang_timeout_s)
        self.control.locate = detector.locate
        return detector

    def _stop_requested(self) -> bool:
        """Return True once the workers should stop."""
        if self.control.reason is None:
            return False
        if not self._stop_announced:
            self._stop_announced = True
            self._emit(events.StopRequested(self.control.reason))
        return True

    def _announce_outage(self) -> None:
        if bool(self.control.outage) != self._outage:
            self._outage = not self._outage
            text = f"{self.control.outage}; training continues, and the next checkpoint waits for it"
            self._emit(events.WarningNotice(text) if self._outage else events.Notice("storage   answers again"))

    def _receive(self) -> None:
        """Emit the events of the run's extensions."""
        for _ in range(len(self._sent)):  # events sent meanwhile are received by the next call
            self._emit(self._sent.popleft())

    def _emit(self, event: events.Event) -> None:
        with self._emitting:
            if self.recorder is not None:
                self.recorder.handle(event)
            for listener in list(self._listeners):
                listener(event)
            outdated = self._unread and isinstance(self._unread[-1], events.StepProgress)
            if outdated and isinstance(event, events.StepProgress):
                self._unread.pop()  # nobody has read it yet
            self._unread.append(event)

    def _take_unread(self) -> Iterator[events.Event]:
        while self._unread:
            yield self._unread.popleft()


def _inbox(plan: RunPlan) -> Inbox:
    """Return the driver's end of the channel: that of the engine, or one for workers elsewhere."""
    if (inbox := getattr(plan.engine, "inbox", None)) is not None:
        return cast(Inbox, inbox())
    from mlx_runtime.workers.receiver import Receiver  # here, because most runs have no such workers

    return Receiver(plan.cluster.host)
