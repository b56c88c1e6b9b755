"""Events of a run: what workers send to the driver, and what the driver passes to its listeners.

Each event is a frozen dataclass. Those that workers send cross a socket as JSON objects, whose `kind` names the class;
`decode` refuses anything that is not exactly one of them, because anyone can connect to the socket.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Event:
    """Base of all events."""


# -- sent by workers, or by the engine that starts them


@dataclass(frozen=True)
class WorkerConnected(Event):
    """A worker has connected to the driver. A replacement of a lost worker connects again."""

    rank: int


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers have built the experiment. Sent again after each restart.

    Attributes:
        device: like `cpu` or `NVIDIA H200`.
        parameters: number of model parameters.
        world_size: number of workers.
    """

    device: str
    parameters: int
    world_size: int


@dataclass(frozen=True)
class LoopStarted(Event):
    """Every worker has restored its state, and user code's loop is running."""


@dataclass(frozen=True)
class LoaderOpened(Event):
    """The first pass over a dataset has begun.

    Attributes:
        name: name of the dataset, like `train`.
        training: True if its steps count as training steps.
        rows, steps: in one pass over all workers.
        global_batch: rows per update.
    """

    name: str
    training: bool
    rows: int
    steps: int
    global_batch: int


@dataclass(frozen=True)
class StepProgress(Event):
    """Progress within a pass, sent at most ten times a second.

    Attributes:
        stage: `train`, `val`, …, or the name that user code gave the pass.
        epoch: epoch, counted from 0.
        step, steps: number of steps taken so far, and in total.
        rate: steps per second; 0 until it is known.
        values: latest metrics of the pass; may be empty.
    """

    stage: str
    epoch: int
    step: int
    steps: int
    rate: float
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochEnded(Event):
    """The end of an epoch, or what user code recorded after its checkpoint.

    Attributes:
        epoch: epoch, counted from 0.
        epochs: `cfg.num_epochs`.
        values: last value of each metric.
        seconds: duration.
        samples_per_s, data_wait_pct: reading speed of the training pass, and the share of its time that the slowest
            worker waited for data; None without a training pass.
    """

    epoch: int
    epochs: int
    values: Mapping[str, float]
    seconds: float
    samples_per_s: float | None = None
    data_wait_pct: float | None = None


@dataclass(frozen=True)
class Report(Event):
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
class CheckpointSaved(Event):
    """A checkpoint is complete in the storage.

    Attributes:
        epoch: epoch, counted from 0.
        finished: True at the end of an epoch, False within one.
        step: global step.
        path: path or URI of its folder.
        metrics: metrics passed to `save_checkpoint`.
    """

    epoch: int
    finished: bool
    step: int
    path: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Notice(Event):
    """A line for the user.

    Attributes:
        text: the line.
        once: several workers may send it; show it once.
    """

    text: str
    once: bool = False


@dataclass(frozen=True)
class WarningNotice(Notice):
    """A line that a quiet display shows as well."""


@dataclass(frozen=True)
class WorkerOutput(Event):
    """Whole lines that a worker of the local engine printed, without the last newline."""

    text: str
    to_stderr: bool


@dataclass(frozen=True)
class WorkersLost(Event):
    """Workers are gone, and the engine is about to replace them.

    Attributes:
        ranks: ranks of the lost workers.
        why: one line.
    """

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class WorkerStalled(Event):
    """A worker has taken no step for `cfg.hang_timeout_s`.

    Attributes:
        seconds: seconds since its last step.
    """

    seconds: float


@dataclass(frozen=True)
class WorkerPosition(Event):
    """The position of a worker in user code, sent when the driver asks for it.

    Attributes:
        rank: rank of the worker.
        epoch: epoch, counted from 0.
        stage: pass in progress, or None before the first.
        step: step within that pass.
        at: line of user code that is executing, like `src/experiment.py:30 in worker_loop`; empty if unknown.
        waits_in: collective that the worker is waiting in, or None.
        seconds: seconds since its last step.
        gpu: True if it trains on a GPU, where Python does not see collectives wait.
    """

    rank: int
    epoch: int = 0
    stage: str | None = None
    step: int = 0
    at: str = ""
    waits_in: str | None = None
    seconds: float = 0.0
    gpu: bool = False


@dataclass(frozen=True)
class LoopEnded(Event):
    """User code's loop has returned, or was stopped after a checkpoint.

    Attributes:
        metrics: latest value of every recorded number.
        stopped: True if it was stopped before its end.
        logged: names of the numbers recorded by `self.log`.
    """

    metrics: Mapping[str, float]
    stopped: bool
    logged: tuple[str, ...] = ()


# -- from the driver itself


@dataclass(frozen=True)
class RunInfo:
    """The run that trackers, callbacks and listeners are told about.

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
class DatasetsPrepared(Event):
    """Prepared datasets that the run reads instead of samples; sent only if there are any.

    Attributes:
        names: name of each dataset's prepared columns, like `{"train": "train-1f3a…"}`.
        root: folder or URI that holds them.
        created: time of the newest, ISO 8601.
    """

    names: Mapping[str, str]
    root: str
    created: str


@dataclass(frozen=True)
class PreparationProgress(Event):
    """Progress of preparing a dataset.

    Attributes:
        name: name of the dataset.
        done, rows: number of rows prepared so far, and in total.
    """

    name: str
    done: int
    rows: int


@dataclass(frozen=True)
class StopRequested(Event):
    """Workers stop after the current step, with a checkpoint.

    Attributes:
        why: `SIGTERM`, `mlx xp stop`, ….
    """

    why: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a run.

    Attributes:
        status: `SUCCEEDED`, `FAILED` or `STOPPED`.
        metrics: latest value of every recorded number, like `{"test/accuracy": 0.98}`.
        best: epoch, path and value of the best checkpoint by `cfg.monitor`, or None.
        error: what ended the run early, or None.
        evaluation: path of the stored metrics if a checkpoint was evaluated, or None.
    """

    status: str
    metrics: Mapping[str, float]
    best: Mapping[str, Any] | None = None
    error: BaseException | None = None
    evaluation: str | None = None


KINDS: dict[str, type[Event]] = {
    "hello": WorkerConnected,
    "facts": WorkersStarted,
    "began": LoopStarted,
    "loader": LoaderOpened,
    "step": StepProgress,
    "epoch": EpochEnded,
    "report": Report,
    "checkpoint": CheckpointSaved,
    "notice": Notice,
    "warning": WarningNotice,
    "output": WorkerOutput,
    "lost": WorkersLost,
    "hang": WorkerStalled,
    "where": WorkerPosition,
    "end": LoopEnded,
}
"""Events that workers send, by their name on the wire."""

_NAMES = {cls: name for name, cls in KINDS.items()}
_HINTS = {cls: get_type_hints(cls) for cls in KINDS.values()}


def encode(event: Event) -> bytes:
    """Serialize an event that a worker sends."""
    return json.dumps({"kind": _NAMES[type(event)], **vars(event)}).encode()


def decode(message: bytes) -> Event:
    """Deserialize an event.

    Raises:
        ValueError: the message is not an event.
    """
    try:
        found = json.loads(message)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict) or not isinstance(kind := found.pop("kind", None), str) or kind not in KINDS:
        raise ValueError("not an event")
    cls = KINDS[kind]
    hints = _HINTS[cls]
    required = {item.name for item in fields(cls) if item.default is item.default_factory is MISSING}
    if not required <= found.keys() <= hints.keys():
        raise ValueError(f"{kind} with fields {', '.join(found) or 'none'}")
    for name, value in found.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{kind}.{name} is {value!r:.50}")
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return cls(**{**found, **lists})


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a JSON value has the type of a field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
