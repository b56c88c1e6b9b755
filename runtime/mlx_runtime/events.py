"""Events of a run: messages from workers to the driver, and from the driver to its listeners.

Each event is a frozen dataclass. Those that workers send cross a socket as JSON objects, whose `kind` names the class;
`decode` rejects anything else, because anyone can connect to the socket.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from mlx_runtime.storage.documents import kind_of, misfit


@dataclass(frozen=True)
class Event:
    """Base of all events. Those that are not a `WorkerEvent` come from the driver itself."""


@dataclass(frozen=True)
class WorkerEvent(Event):
    """Base of the events that workers, or the engine that starts them, send to the driver."""


@dataclass(frozen=True)
class WorkerConnected(WorkerEvent):
    """A worker has connected to the driver. A replacement of a lost worker connects again."""

    rank: int


@dataclass(frozen=True)
class WorkersWaiting(WorkerEvent):
    """The cluster has no room for the workers yet; `why` is like `3 CPUs, 2 free`."""

    why: str


@dataclass(frozen=True)
class WorkersStarted(WorkerEvent):
    """All workers have built the experiment. Sent again after each restart."""

    device: str  # like `cpu` or `NVIDIA H200`
    parameters: int  # of all models
    world_size: int
    sharded: tuple[str, ...] = ()  # one line for each sharded model
    trained: int | None = None  # parameters that require gradients


@dataclass(frozen=True)
class LoopStarted(WorkerEvent):
    """Every worker has restored its state, and user code's loop is running."""


@dataclass(frozen=True)
class LoaderOpened(WorkerEvent):
    """The first pass over a dataset has begun; `rows` and `steps` are those of one pass over all workers."""

    name: str  # like `train`
    training: bool  # its steps count as training steps
    rows: int
    steps: int
    global_batch: int  # rows per update
    updates: int  # in one pass: fewer than steps if gradients are accumulated


@dataclass(frozen=True)
class StepProgress(WorkerEvent):
    """Progress within a pass, sent at most ten times a second."""

    stage: str  # `train`, `val`, …, or the name that user code gave the pass
    epoch: int  # from 0
    step: int  # steps taken so far
    steps: int  # in total
    rate: float  # steps per second; 0 until it is known
    values: Mapping[str, float] = field(default_factory=dict)  # latest metrics of the pass; may be empty


@dataclass(frozen=True)
class EpochEnded(WorkerEvent):
    """The end of an epoch. Sent again for values that are recorded after its checkpoint, with only these."""

    epoch: int  # from 0
    epochs: int  # expected in total: `cfg.num_epochs`, or as many as `cfg.max_steps` allows; 0 in an evaluation
    values: Mapping[str, float]  # last value of each metric
    seconds: float
    samples_per_s: float | None = None  # of the training pass; None if there was none
    row_counts: Mapping[str, float] = field(default_factory=dict)  # other units per sample of it, like {"tokens": 64}
    data_wait_pct: float | None = None  # share of that pass in which the slowest worker waited for data


@dataclass(frozen=True)
class Report(WorkerEvent):
    """Numbers that were recorded together. Sent only if a callback has `on_report`.

    Attributes:
        step: global step, the x axis.
        epoch: epoch, as user code counts epochs, from 0.
        values: like `{"train/loss": 0.3, "lr/adam": 0.001}`.
        facts: when and where: `training_iteration` (number of the report in this run), `timestamp` (seconds since
            1970), `date` (UTC), `time_this_iter_s` (since the previous report), `time_total_s` (of training, over all
            attempts), `hostname`, `node_ip`, `pid`.
    """

    step: int
    epoch: int
    values: Mapping[str, float]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointSaved(WorkerEvent):
    """A checkpoint is complete in the storage."""

    epoch: int  # from 0
    finished: bool  # True at the end of an epoch, False within one
    step: int  # global step
    path: str  # path or URI of its folder
    metrics: Mapping[str, float]  # recorded since the checkpoint of an earlier step


@dataclass(frozen=True)
class Notice(WorkerEvent):
    """A line for the user."""

    text: str
    once: bool = False  # several workers may send it; it is shown once


@dataclass(frozen=True)
class WarningNotice(Notice):
    """A line that even a quiet display shows."""


@dataclass(frozen=True)
class WorkerOutput(WorkerEvent):
    """Whole lines that a worker of the local engine printed, without the last newline."""

    text: str
    to_stderr: bool


@dataclass(frozen=True)
class WorkersLost(WorkerEvent):
    """Workers are gone, and the engine is about to replace them."""

    ranks: tuple[int, ...]
    why: str  # one line


@dataclass(frozen=True)
class WorkerStalled(WorkerEvent):
    """A worker has taken no step for `cfg.elastic.hang_timeout_s`."""

    seconds: float  # since its last step


@dataclass(frozen=True)
class WorkerPosition(WorkerEvent):
    """The position of a worker in user code, sent when the driver asks for it."""

    rank: int
    epoch: int = 0
    stage: str | None = None  # pass in progress; None before the first
    step: int = 0  # within that pass
    at: str = ""  # line that is executing, like `src/experiment.py:30 in worker_loop`; empty if unknown
    waits_in: str | None = None  # collective that the worker is waiting in
    seconds: float = 0.0  # since its last step
    gpu: bool = False  # True if it trains on a GPU, where Python does not see collectives wait
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class LoopEnded(WorkerEvent):
    """User code's loop has returned, or was stopped after a checkpoint."""

    metrics: Mapping[str, float]  # latest value of every recorded number
    stopped: bool  # before its end
    logged: tuple[str, ...] = ()  # names of the numbers recorded by `self.log`


@dataclass(frozen=True)
class FunctionReport(WorkerEvent):
    """The reports of all workers in a function of `Trainer.run`."""

    values: tuple[Mapping[str, float | str], ...]  # by rank


@dataclass(frozen=True)
class FunctionReturned(WorkerEvent):
    """The function of `Trainer.run` has returned on a worker."""

    rank: int
    world_size: int
    pickled: str  # its value, in base64
    problem: str = ""  # reason why the value was not sent


@dataclass(frozen=True)
class RunInfo:
    """The run that a tracker, a callback or a listener receives.

    Attributes:
        experiment, name: like `digits`, `run_003`.
        folder: folder on this machine; files written here are stored with the run.
        place: path or URI where the run is stored.
        config: conf.yaml of the run as plain dicts, without secrets.
        attempt: 1 for a new run, plus 1 for each time it was resumed.
    """

    experiment: str
    name: str
    folder: Path
    place: str
    config: Mapping[str, Any]
    attempt: int


@dataclass(frozen=True)
class RunStarted(Event):
    """The driver owns the run folder and is about to start workers."""

    run: RunInfo


@dataclass(frozen=True)
class DatasetsPrepared(WorkerEvent):
    """Prepared datasets that the run reads instead of samples; sent only if there are any."""

    names: Mapping[str, str]  # names of prepared columns by dataset, like `{"train": "train-1f3a…"}`
    root: str  # folder or URI that holds them
    created: str  # time of the newest, ISO 8601


@dataclass(frozen=True)
class PreparationProgress(WorkerEvent):
    """Progress of preparing a dataset."""

    name: str
    done: int  # rows prepared so far
    rows: int  # in total


@dataclass(frozen=True)
class StopRequested(Event):
    """Workers stop after the current step, with a checkpoint."""

    why: str  # `SIGTERM`, `mlx xp stop`, …


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a run."""

    status: str  # `SUCCEEDED`, `FAILED`, `STOPPED` or `PRUNED`
    metrics: Mapping[str, float]  # latest value of every recorded number, like `{"test/accuracy": 0.98}`
    best: Mapping[str, Any] | None = None  # epoch, path and value of the best checkpoint; its step if within an epoch
    error: BaseException | None = None  # error that ended the run
    evaluation: str | None = None  # path of the stored metrics if a checkpoint was evaluated


KINDS: dict[str, type[Event]] = {cls.__name__: cls for cls in (*WorkerEvent.__subclasses__(), WarningNotice)}
"""Events that cross the socket, by their `kind`."""

_SHAPES = {cls: {name: kind_of(hint) for name, hint in get_type_hints(cls).items()} for cls in KINDS.values()}


def encode(event: Event) -> bytes:
    """Serialize an event that a worker sends."""
    return json.dumps({"kind": type(event).__name__, **vars(event)}).encode()


def decode(message: bytes) -> Event:
    """Deserialize an event.

    Raises:
        ValueError: the message is not an event.
    """
    try:
        found = json.loads(message)
        cls = KINDS[found.pop("kind")]
        if problem := misfit(found, _SHAPES[cls]):
            raise ValueError(problem)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError("not an event") from error
