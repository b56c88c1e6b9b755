"""Predictions for all rows of a dataset or a file: every row once, in order, by any number of processes."""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlx_runtime.companions.serving.loading import choose_checkpoint, refuse_function
from mlx_runtime.companions.serving.predictions.parts import Parts, part_name
from mlx_runtime.companions.serving.predictions.results import join, table_of, write_part
from mlx_runtime.companions.serving.predictions.sources import Selection, select
from mlx_runtime.companions.serving.predictions.tables import Rows
from mlx_runtime.companions.serving.predictor import PredictError
from mlx_runtime.companions.serving.schema import STRING
from mlx_runtime.config.projects import AN_EXPERIMENT, EXPERIMENT, main_class
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import MlxError, RunStopped, StorageError, UsageError, WorkerLostError, printable, short_message
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.runs.queries.reader import open_run
from mlx_runtime.runs.sources import code_digest
from mlx_runtime.runs.tables import format_duration, plural
from mlx_runtime.settings import Settings
from mlx_runtime.workers.fork_server import ForkServer, exit_reason
from mlx_runtime.workers.stop_requests import StopRequests, sigterm_stops

BATCH_SIZE = 256
"""Rows per call of predict, as in a `Predictor`."""

BLOCK_BATCHES = 8
"""Batches per block: the outputs that are in memory, and are lost when the command is killed."""

OUTPUTS = (".parquet", ".jsonl")
"""Suffixes of the files that are written."""

EXIT_S = 5.0
"""Seconds within which the exit code of a lost worker is known."""

LINE_S = 10.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Options:
    """Options of `mlx train predict`."""

    checkpoint: str | None = None  # by default the best, or else the latest
    dataset: str | None = None  # by default the one for predictions, or else for tests
    workers: int | None = None  # by default one per GPU
    batch_size: int = BATCH_SIZE
    device: str | None = None
    keep: tuple[str, ...] = ()  # columns of the rows to copy
    force: bool = False  # replace the output
    trust: bool = False  # use the stored code

    @property
    def block_rows(self) -> int:
        return BLOCK_BATCHES * self.batch_size


@dataclass(frozen=True)
class Job:
    """The work of all processes."""

    run: str  # folder or URI
    checkpoint: str
    rows: Selection
    output: Path
    parts: Path
    finished: Mapping[int, int]  # rows of the blocks that an interrupted command has written
    options: Options
    workers: int
    devices: tuple[str | None, ...]  # of the workers, in turn


class Block(NamedTuple):
    """A block that has been written."""

    rows: int  # fewer than in other blocks, or 0, at the end
    reads: tuple[str, ...]  # columns that predict reads


def predict(run: str, output: Path, options: Options) -> str:
    """Write the outputs of predict for all rows to a file. Return a line that describes it.

    Raises:
        UsageError: there is no such run, checkpoint or dataset, a row does not fit, or the output exists.
        PredictError: predict failed on a row. Finished blocks are kept, as after all other errors.
        StorageError: the output cannot be written.
        RunStopped: Ctrl-C or SIGTERM.
    """
    started = time.monotonic()
    check_output(output, force=options.force)
    folder = resolve_run(run)
    config = open_run(folder.location).config
    if not options.trust and not Path(EXPERIMENT).is_file():
        raise UsageError(
            f"{Path.cwd()} is not the experiment of {folder.title}, whose code is needed. Change to it or, if you "
            "trust everyone who can write to that storage, use the stored code: --code stored"
        )
    refuse_function(folder, config)
    checkpoint, rows = choose_checkpoint(folder, options.checkpoint), select(config, options.dataset)
    gpus = 0 if config["cfg"].get("use_gpu") is False or options.device else torch.cuda.device_count()
    devices = tuple(f"cuda:{number}" for number in range(gpus)) if gpus > 1 else (options.device,)
    workers = options.workers or len(devices)
    manifest = {
        "run": folder.location,
        "checkpoint": [checkpoint.name, checkpoint.sha256, checkpoint.index_sha256],
        "dataset": rows.facts(),
        "--keep": list(options.keep),
        "--batch-size": [options.batch_size, options.block_rows],
        "device": options.device or ("cuda" if gpus else "cpu"),
        "src": "stored" if options.trust else code_digest(Path.cwd()),
    }
    parts = Parts(output, manifest)
    job = Job(folder.location, checkpoint.name, rows, output, parts.folder, parts.finished, options, workers, devices)
    control = StopRequests()
    progress = Progress(f"{folder.title} {checkpoint.name} on {rows.title}")
    finished = False
    try:
        with sigterm_stops(control):
            names = _work(job, parts, progress)
        finished = True
    except KeyboardInterrupt:
        code = control.exit_code if control.reason else RunStopped.exit_code
        done = f"stopped after {plural(progress.done, 'row')}; to continue, type the same command again"
        raise RunStopped(done, code) from None
    finally:
        parts.close(finished=finished)
    took = format_duration(time.monotonic() - started)
    columns = f"{plural(progress.done, 'row')} of {', '.join(names)}"
    return f"wrote {output}: {columns}, in {took}, by {folder.title} {checkpoint.name}"


def check_output(output: Path, *, force: bool) -> None:
    """Raise UsageError if an output cannot be written."""
    if output.suffix.lower() not in OUTPUTS:
        raise UsageError(f"{output}: files of predictions end with {' or '.join(OUTPUTS)}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} for {output.name}; create it, or name another with -o")
    if output.exists() and not force:
        raise UsageError(f"{output} exists; replace it with --force, or name another file with -o")


def _work(job: Job, parts: Parts, progress: "Progress") -> list[str]:
    """Write the missing blocks, and join all. Return the names of the columns."""
    if job.workers > 1 and not job.options.trust:
        main_class(AN_EXPERIMENT, Path.cwd())  # imported once for all workers
    server = ForkServer() if job.workers > 1 else None  # before this process has threads
    try:
        progress.begin(sum(job.finished.values()), parts.note)
        for done in _blocks_of_workers(server, job) if server else _blocks(job, 0):
            progress.advance(done)
    finally:
        if server:
            server.close()
    if not progress.done:
        raise UsageError(f"{job.rows.title} has no rows; {job.output} was not written")
    with _writing(job.output):
        return join(parts.files(), job.output, parts.folder / f".{job.output.name}", job.options.keep)


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or short_message(error)
        raise StorageError(f"cannot write {output}: {reason}; to continue, type the same command again") from error


def _blocks(job: Job, rank: int) -> Iterator[Block]:
    """Write the missing blocks among those of a worker, up to the end of the rows."""
    writer = None
    for number in itertools.count(rank, job.workers):
        rows = job.finished.get(number)
        if rows is None:
            writer = writer or BlockWriter(job, rank)
            block = writer.write(number)
            yield block
            rows = block.rows
        if rows < job.options.block_rows:
            return


def _blocks_of_workers(server: ForkServer, job: Job) -> Iterator[Block]:
    """Write blocks in several processes."""
    channels: dict[Any, int] = {}
    try:
        for rank in range(job.workers):
            ours, theirs = Pipe(duplex=False)
            streams = [open(2, "w", closefd=False) for _ in range(2)]  # noqa: SIM115 - stdout is for results
            server.start(rank, partial(work, job, rank), {**os.environ}, [*streams, theirs])
            theirs.close()
            channels[ours] = rank
        while channels:
            ready: list[Any] = connection.wait(list(channels))
            for channel in ready:
                try:
                    done = channel.recv()
                except (EOFError, ConnectionError):
                    codes = dict(server.exits(EXIT_S))
                    how = exit_reason(codes.get(channels[channel]))
                    message = f"worker {channels[channel]} {how}; to continue, type the same command again"
                    raise WorkerLostError(message) from None
                if isinstance(done, MlxError):
                    raise done
                if done is None:
                    channel.close()
                    del channels[channel]
                else:
                    yield done
    finally:
        for channel in channels:
            channel.close()


def work(job: Job, rank: int, channel: Any) -> int:
    """Write the blocks of a worker in this process, which a server has started. Send them, and None at the end."""
    try:
        for block in _blocks(job, rank):
            channel.send(block)
        channel.send(None)
    except ConnectionError:  # the command was killed
        return 0
    except MlxError as error:
        channel.send(error)
    return 0


class BlockWriter:
    """Reads blocks of rows, predicts them, and writes their outputs as parts."""

    def __init__(self, job: Job, rank: int) -> None:
        if job.workers > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // job.workers))
        options, self._job = job.options, job
        device = job.devices[rank % len(job.devices)]
        self._predictor = open_run(job.run).predictor(job.checkpoint, device=device, trust=options.trust)
        self._predictor.max_rows = options.batch_size
        size, schema = options.batch_size, self._predictor.schema
        self._source = job.rows.open(resolve_run(job.run), schema, options.keep, size, trust=options.trust)

    def write(self, number: int) -> Block:
        """Write a block, which is empty behind the last row."""
        options, tables, count = self._job.options, [], 0
        first, size = number * options.block_rows, options.batch_size
        for start in range(first, first + options.block_rows, size):
            rows = self._source.read(start, size)
            if not rows.size:
                break
            tables.append(table_of(self._answer(rows, start), rows.kept))
            count += rows.size
        path = self._job.parts / part_name(number, count)
        with _writing(self._job.output):
            if tables:
                write_part(path, tables, options.keep)
            else:
                path.touch()
        return Block(count, self._predictor.schema.names)

    def _answer(self, rows: Rows, start: int) -> dict[str, Any]:
        """Return the outputs of rows: tensors (rows, ...), or a list of one tensor per row if shapes differ.

        Raises:
            PredictError: predict failed. The message names the row.
        """
        texts = {column.name for column in self._predictor.schema.columns if column.dtype == STRING}
        batch, differ = rows.columns, any(isinstance(rows.columns[name], list) for name in {*rows.columns} - texts)
        with temporary_seed(mix_seeds(self._job.rows.seed, start)):  # random outputs do not depend on the worker
            if differ:
                whole = [{name: batch[name][row] for name in batch} for row in range(rows.size)]
                answers = self._predictor.answer(whole)
            else:
                with contextlib.suppress(PredictError):  # again for each row, to name it
                    return self._predictor.predict(batch, rows.size)
                answers = self._predictor.answer_batch(batch, rows.size)
        for row, answer in enumerate(answers, start):
            if isinstance(answer, Exception):
                raise PredictError(f"{self._source.title}: row {row}: {answer}") from answer
        found = {name: [answer[name] for answer in answers] for name in answers[0]}
        alike = {name: len({value.shape for value in values}) == 1 for name, values in found.items()}
        return {name: torch.stack(values) if alike[name] else values for name, values in found.items()}


class Progress:
    """Lines on stderr: rows, and rows per second."""

    def __init__(self, title: str) -> None:
        self.done = 0
        self._title, self._shown = title, not Settings.read().quiet
        self._first: tuple[float, int] | None = None  # when the first block was done, and the rows until then
        self._printed_at = 0.0

    def begin(self, done: int, note: str) -> None:
        """Print the title, and how many rows are finished already."""
        self.done = done
        if note:
            self._print(note)
        more = f", continuing after {plural(done, 'row')}" if done else ""
        self._print(f"predicting with {self._title}{more}")

    def advance(self, block: Block) -> None:
        """Count the rows of a block."""
        self.done += block.rows
        now = time.monotonic()
        if self._first is None:  # a resumed stream has skipped the rows of earlier blocks
            self._print(f"predict reads {', '.join(block.reads)}")
            self._first, self._printed_at = (now, self.done), now
        if now - self._printed_at >= LINE_S:
            self._printed_at = now
            rate = (self.done - self._first[1]) / (now - self._first[0])
            self._print(f"{plural(self.done, 'row')}, {rate:,.0f} rows/s")

    def _print(self, text: str) -> None:
        if self._shown:
            print(printable(text, one_line=True), file=sys.stderr, flush=True)
