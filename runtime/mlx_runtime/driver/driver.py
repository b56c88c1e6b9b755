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
from mlx_runtime.errors import USER_ERRORS, MlxError, located
from mlx_runtime.loop.job import LOCATE, STOP, Inbox, Job
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.settings import Settings
from mlx_runtime.tracking.callbacks import Listeners
from mlx_runtime.workers.stop_requests import StopRequests, Terminated

if TYPE_CHECKING:
    from mlx_runtime.companions.prepared.store import PreparedSet

SLOW_START_S = 2.0
"""Interval at which the driver asks what workers wait for."""


class Driver:
    """Trains one run, and passes its events to listeners.

    A driver installs no signal handlers, prints nothing and may run in any thread, so commands, notebooks, sweeps and
    tests can all use it:

        def listen(event):
            match event:
                case EpochEnded(epoch, values=values) if values["val/loss"] > 2:
                    driver.control.request("no progress")

        config = load_config(Experiment)
        with connect(config.cfg) as cluster, prepare_run(Experiment, config, cluster) as plan:
            driver = Driver(plan, [listen])
            driver.run()

    Args:
        plan: plan of the run, from `prepare_run`.
        listeners: called with each event, one at a time; the last one is `RunEnded`.
        control: determines when the run ends early.
    """

    def __init__(
        self, plan: RunPlan, listeners: Sequence[Listener] = (), *, control: StopRequests | None = None
    ) -> None:
        self.control = control or StopRequests()
        self.recorder: RunRecorder | None = None  # set when the run is claimed
        self.stopped = False  # the run ends because of an interrupt
        self._plan = plan
        callbacks = Listeners(plan.config.cfg.callbacks, "callbacks", lambda text: self._emit(events.Notice(text)))
        self._listeners: list[Listener] = [*listeners, callbacks.handle]
        self._emitting = threading.RLock()  # because without workers, another thread reports checkpoints
        self._sent: deque[events.Event] = deque()  # by extensions, in any thread
        self._stop_announced = self._interrupted = self._outage = False

    @property
    def folder(self) -> RunFolder:
        """Folder of the run, once it has been claimed."""
        assert self.recorder is not None
        return self.recorder.record.folder

    @property
    def resuming(self) -> bool:
        """True for a run to resume that has not begun, or never will."""
        return self.recorder is not None and self.recorder.record.resuming

    def run(self) -> events.RunEnded:
        """Train, and return the outcome of a run that has succeeded or was stopped by a request.

        Raises:
            UsageError: another driver is training the run.
            StorageError: the run folder cannot be written.
            WorkerLoopError: user code raised an exception.
            WorkerLostError: workers were lost more than `cfg.elastic.max_failures` times.
            HangError: the workers deadlocked.
        """
        with contextlib.ExitStack() as guard, contextlib.ExitStack() as extensions:
            record = claim(self._plan, guard)
            recorder = self.recorder = RunRecorder(record, self._plan)
            accompanied = AccompaniedRun(record, self.control.request, self._sent.append)
            try:
                with (
                    self.control.watch(record.folder, record["attempt"]),
                    contextlib.ExitStack() as stack,
                    record.alive(),
                ):
                    guard.close()
                    for extension in self._plan.extensions:
                        extensions.enter_context(self._accompany(extension, accompanied))
                    self._train(recorder, stack)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and self.control.taken_over:
                    raise record.disown() from None
                self.stopped = isinstance(error, KeyboardInterrupt)
                if self.control.reason is not None:  # before training, no event has told it
                    record.note(stop_reason=self.control.reason)
                status = "FAILED" if not self.stopped else "PRUNED" if self.control.pruned else "STOPPED"
                ended = self._record_end(recorder.end_early, status, error)
            else:
                ended = self._record_end(recorder.succeed)
            finally:
                accompanied.taken_over = self.control.taken_over
                accompanied.interrupted = accompanied.interrupted or self._interrupted
                extensions.close()
                self._receive()
        self._emit(ended)
        if ended.error is not None and not isinstance(ended.error, Terminated):
            raise ended.error
        return ended

    @contextlib.contextmanager
    def _accompany(self, extension: RunExtension, run: AccompaniedRun) -> Iterator[None]:
        """Let an extension listen within the block. Its first exception is reported and ends that."""
        listening = contextlib.ExitStack()

        @contextlib.contextmanager
        def report(*raised: type[BaseException]) -> Iterator[None]:
            try:
                yield
            except USER_ERRORS as error:
                if isinstance(error, raised):
                    raise
                listening.close()
                text = f"{type(extension).__name__} failed, the run continues without it: {located(error)}"
                run.notify(events.WarningNotice(text))

        entered = contextlib.ExitStack()
        with report(MlxError):
            if (listener := entered.enter_context(extension.accompany(run))) is not None:
                listen = report()(listener)
                self._listeners.insert(0, listen)
                listening.callback(self._listeners.remove, listen)
        yield
        with report():
            try:
                entered.close()
            except KeyboardInterrupt:  # exit the others, too, without waiting
                run.interrupted = True
        listening.close()

    def _record_end(self, end: Callable[..., events.RunEnded], *arguments: Any) -> events.RunEnded:
        try:
            return end(*arguments)
        except KeyboardInterrupt:  # too late to stop the run, but nothing else is waited for
            if self.stopped and self.folder.uri:  # it has been stopped, and the storage may not answer
                raise
            self._interrupted = True
            return end(*arguments)

    def _train(self, recorder: RunRecorder, stack: contextlib.ExitStack) -> None:
        """Prepare the datasets, start the workers, and follow them to the end."""
        plan, config, record = self._plan, self._plan.config, recorder.record
        if not record.resuming:
            recorder.begin()
        folder, attempt = record.folder, record["attempt"]
        run = events.RunInfo(folder.experiment, folder.name, folder.path, folder.location, config.shown, attempt)
        self._emit(events.RunStarted(run))
        self._receive()
        if plan.fold is not None and (warning := plan.fold.leak_warning(config.tree)):
            self._emit(events.Notice(warning))
        sets: dict[str, PreparedSet] = {}
        if may_be_prepared(config):
            sets = companions.part("prepared.datasets").sets_of_run(config, plan.project, self._emit, stack)
        self.control.check()
        with contextlib.closing(_inbox(plan)) as receiver:
            job = Job(
                experiment=path_of(plan.experiment),
                tree=config.tree,
                run=run,
                root=folder.root,
                project=plan.project,
                cluster=plan.cluster,
                verbose=Settings.read().verbose,
                prepared=sets,
                subsets=plan.fold.subsets() if plan.fold is not None else {},
                receiver=(receiver.address, receiver.key),
                evaluate=config.checkpoint is not None,
            )
            self.follow(job, receiver, recorder)
        if recorder.stopped:
            raise Terminated

    def follow(self, job: Job, receiver: Inbox, recorder: RunRecorder) -> None:
        """Start the workers, and emit their events until they are done."""
        deadlocks = None
        if not self._plan.cluster.in_driver:
            from mlx_runtime.workers.deadlocks import DeadlockDetector

            hang_timeout_s = self._plan.config.cfg.elastic.hang_timeout_s
            deadlocks = DeadlockDetector(lambda: receiver.broadcast(LOCATE), hang_timeout_s)
            self.control.locate = deadlocks.locate
        look_at, stop_sent, missing = time.monotonic() + SLOW_START_S, False, None
        with contextlib.ExitStack() as stack:
            group = self._plan.engine.start(job, self._emit, self._stop_requested)
            stack.callback(group.close)
            self.control.locate = getattr(group, "locate", self.control.locate)  # of an engine without workers
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
            except MlxError:  # the record needs the events that workers sent before they failed
                stack.close()  # ends local workers, so that `drain` does not wait for them
                self._drain(receiver)
                raise
            self._drain(receiver)

    def _drain(self, receiver: Inbox) -> None:
        for event in receiver.drain():
            self._emit(event)

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
            if isinstance(event, events.WorkersStarted):
                self.control.allow_checkpoint()
            for listener in list(self._listeners):
                listener(event)


def _inbox(plan: RunPlan) -> Inbox:
    """Return the driver's end of the channel: that of the engine, or one for workers elsewhere."""
    if (inbox := getattr(plan.engine, "inbox", None)) is not None:
        return cast(Inbox, inbox())
    from mlx_runtime.workers.receiver import Receiver  # here, because most runs have no such workers

    return Receiver(plan.cluster.host)
