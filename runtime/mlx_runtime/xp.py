"""The verbs of `mlx xp` on one run: its log, its TensorBoard, its end."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import registry
from mlx_runtime.documents import selected
from mlx_runtime.errors import ClusterError, ConfigError, MlxError, UsageError, near, plain
from mlx_runtime.layout import CONF, RunFolder, find_run, named_run, storage_root
from mlx_runtime.logs import last_lines, ranks, stored
from mlx_runtime.saved import saved_in
from mlx_runtime.settings import Settings
from mlx_runtime.storage import Storage, is_uri, joined

if TYPE_CHECKING:
    from mlx_runtime.jobs import Jobs

FOLLOW_S = 1.0
"""How often the stored log of a living run is looked at; a fifth as often on an object store."""

MIRROR_S = 10.0
"""How often what TensorBoard shows of an object store is brought up to date."""

EXITS = {"SUCCEEDED": 0, "STOPPED": 143}
"""What a run ended with, whose process nobody can ask any more."""

STOP_S = 60
"""How long `stop` waits for the run to end: it finishes a step and saves a checkpoint."""


def storage() -> str:
    """The storage of the experiment here: `MLX_STORAGE`, else what its conf.yaml says.

    Raises:
        UsageError: neither says anything.
    """
    chosen = Settings.read().storage
    if chosen is None:
        chosen = configured("cfg.storage_path")
    if chosen is None:
        raise UsageError("which storage? Change into an experiment, or set MLX_STORAGE=FOLDER")
    return storage_root(chosen)


def named(text: str) -> RunFolder:
    """One run as a person names it: `run_003`, `3` or `latest` of the experiment here, `digits/run_003`, or the path or
    URI of its folder.

    Raises:
        UsageError: there is no such run.
    """
    if is_uri(text) or Path(text, "run.json").is_file():
        return named_run(text, "", "")
    here = None if "/" in text else configured("cfg.name")
    if "/" not in text and here is None:
        raise UsageError(f"{text!r} names no run here; write name/run_003, or the path of its folder")
    return named_run(text, storage(), here or "")


def configured(key: str) -> str | None:
    """What the conf.yaml here says; None without one.

    Raises:
        ConfigError: it cannot be read.
    """
    if not CONF.is_file():
        return None
    try:
        return selected(CONF.read_bytes(), key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {CONF}: {error}; correct it") from error


def checkpoint(text: str) -> tuple[RunFolder, str]:
    """A checkpoint as a person names it: its folder or URI, or a run as for `named`, of which it is the latest.

    Returns:
        The run that it is of, and its folder or URI.

    Raises:
        UsageError: there is no such run or checkpoint.
        StorageError: the storage does not answer.
    """
    place = text if is_uri(text) or not Path(text).is_dir() else str(Path(text).resolve())
    match = re.fullmatch(r"([^?]+)/checkpoints/(epoch_\d+(?:_step_\d+)?)/?(\?.*)?", place)
    folder = named(match[1] + (match[3] or "")) if match else named(text)
    known = [item.name for item in saved_in(folder.checkpoints)]
    if not known:
        raise UsageError(f"{folder.title} has no checkpoint yet")
    name = match[2] if match else known[-1]
    if name not in known:
        raise UsageError(f"{folder.title} has no checkpoint {name}.{near(name, known)}")
    return folder, joined(folder.checkpoints, name)


def chosen(name: str, run: str) -> RunFolder:
    """One run as a person names it in two words, or in one: `digits/run_003`, or the path or URI of its folder.

    Args:
        name: an experiment in the storage, or all in one.
        run: `run_003`, `3` or `latest`.

    Raises:
        UsageError: there is no such run.
    """
    return named(name) if "/" in name else find_run(storage(), name, run)


def stop(name: str, run: str) -> str:
    """Ask a run to save a checkpoint and end, wherever its driver is, and wait until it has.

    Args:
        name: an experiment in the storage, or the path of a run's folder.
        run: `run_003`, `3` or `latest`.

    Returns:
        How it ended.

    Raises:
        UsageError: there is no such run, or it does not run.
        MlxError: it has not ended in time.
    """
    folder = chosen(name, run)
    title = f"{folder.experiment} {folder.name}"
    record = registry.recorded(folder)
    status = registry.status_of(record, _job_status(record))
    if status not in registry.LIVING and not registry.resuming(folder, record):
        raise UsageError(f"{title} is {status}; there is nothing to stop")
    if status == "PENDING" and (jobs := _jobs(record)) is not None:
        jobs.stop(record["job"]["id"])
        found = registry.Record(folder, record)
        found.withdraw() if registry.REPLACED in record else found.finish("STOPPED")
        return f"{title} is STOPPED, before it began"
    folder.ask_to_stop()
    until = time.monotonic() + STOP_S
    while status in registry.LIVING or registry.resuming(folder, record):
        if time.monotonic() > until:
            if (jobs := _jobs(record)) is None:
                raise MlxError(
                    f"{title} was asked to stop and is still {status} after {STOP_S} s; is its step so long?"
                )
            jobs.stop(record["job"]["id"])
            return f"{title} did not end within {STOP_S} s; its job was told to"
        time.sleep(0.5)
        record = registry.recorded(folder)
        status = registry.status_of(record)
    return f"{title} is {status}"


def logs(
    name: str,
    run: str,
    write: Callable[[str], None],
    *,
    follow: bool | None = None,
    rank: int | None = None,
    tail: int | None = None,
) -> int:
    """Pass on what a run has printed: from its cluster while that lives, else from its folder.

    Args:
        name: an experiment in the storage, or the path of a run's folder.
        run: `run_003`, `3` or `latest`.
        write: takes pieces of text.
        follow: wait until the run has ended; None means while it lives.
        rank: of a worker; what all have printed when None.
        tail: lines to begin with; all when None.

    Returns:
        The exit code: that of the run if it was followed, else 0.

    Raises:
        UsageError: there is no such run, or no log of that rank.
    """
    folder = chosen(name, run)
    record = registry.recorded(folder)
    if follow is None:
        follow = registry.status_of(record, _job_status(record)) in registry.LIVING
    jobs = _jobs(record) if rank is None else None
    if jobs is not None:
        job = record["job"]["id"]
        try:
            if follow:
                return jobs.follow(job, write, tail).code
            text = jobs.log(job)
            write(text if tail is None else last_lines(text, tail))
            return 0
        except ClusterError:  # gone by now; what it has printed is stored
            pass
    return _stored_logs(folder, write, follow=follow, rank=rank, tail=tail)


def _stored_logs(
    folder: RunFolder, write: Callable[[str], None], *, follow: bool, rank: int | None, tail: int | None
) -> int:
    seen = 0
    while True:
        status = registry.status_of(registry.recorded(folder))  # before the log, so that its end is not missed
        found = stored(folder, rank)
        if found is None and not (follow and status in registry.LIVING):
            known = ranks(folder)
            if rank is not None and known:
                raise UsageError(f"{folder.title} has no rank {rank}.{near(str(rank), known)}")
            raise UsageError(f"{folder.title} has printed nothing that was kept; it is {status}")
        if found is not None and len(found) > seen:
            text = found[seen:].decode(errors="replace")
            write(last_lines(text, tail) if tail is not None and not seen else text)
            seen = len(found)
        if not follow:
            return 0
        if status not in registry.LIVING:
            return EXITS.get(status, 1)
        time.sleep(FOLLOW_S if folder.uri is None else 5 * FOLLOW_S)


def _jobs(record: Mapping[str, Any]) -> "Jobs | None":
    """The cluster of a run's job, if it was launched, and that answers and knows it."""
    job = record.get("job")
    if not job:
        return None
    from mlx_runtime.jobs import Address, Jobs, reached, trusted, untrusted_notice

    if not trusted(job["address"]):
        if record.get("status") in registry.LIVING:  # of any other, the stored log is complete
            print(plain(f"note: {untrusted_notice(job['address'])}"), file=sys.stderr)
        return None
    try:
        jobs = Jobs(reached(Address(job["address"], "its record")))
        jobs.details(job["id"])
    except ClusterError:
        return None
    return jobs


def _job_status(record: Mapping[str, Any]) -> str | None:
    """What its cluster says of a run's job; None when nobody can say."""
    job = record.get("job")
    if not job:
        return None
    from mlx_runtime.jobs import statuses

    pair = (job["address"], job["id"])
    return statuses([pair]).get(pair)


def dashboard(ray_address: str | None) -> str:
    """The page of a cluster, opened in a browser where there is a display.

    Raises:
        UsageError: there is no address.
        ClusterError: the cluster does not answer.
    """
    import webbrowser

    from mlx_runtime.jobs import Address, reached

    url = reached(Address.of(ray_address)).address.url
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        webbrowser.open(url)
    return url


def board(name: str | None, run: str | None, port: int) -> None:
    """Become a TensorBoard on one run, all runs of an experiment, or all there are. Does not return.

    Args:
        name: an experiment in the storage, or the path of any folder with runs.
        run: `run_003`, `3` or `latest`; all runs when None.
        port: on 127.0.0.1.

    Raises:
        UsageError: no such experiment, run or folder.
    """
    place = _place(name, run)
    if is_uri(place):
        _mirrored_board(place, port)
    if not Path(place).is_dir():
        raise UsageError(f"there are no runs in {place} yet; make one with: mlx train run")
    os.execv(sys.executable, _tensorboard(place, port))


def _mirrored_board(place: str, port: int) -> None:
    """A TensorBoard on copies of what an object store has, brought up to date as long as it runs. Does not return."""
    with tempfile.TemporaryDirectory(prefix="mlx-board-") as temporary:
        if not _mirror(place, Path(temporary)):
            raise UsageError(f"there are no runs in {place} yet; make one with: mlx train run")
        server = subprocess.Popen(_tensorboard(temporary, port))
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError, MlxError):
                    _mirror(place, Path(temporary))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(MIRROR_S)
        finally:
            server.terminate()
            server.wait()
    sys.exit(server.returncode)


def _mirror(place: str, folder: Path) -> int:
    """Copy the event files below a place that are new or have grown. Returns how many there are."""
    storage = Storage(place)
    found = [info for info in storage.below() if ".tfevents." in info.base_name]
    for info in found:
        parts = info.path.removeprefix(f"{storage.path}/").split("/")
        file = folder.joinpath(*parts)
        if not file.exists() or file.stat().st_size != info.size:
            storage.download(file, *parts)
    return len(found)


def _tensorboard(folder: str, port: int) -> list[str]:
    options = ["--logdir", folder, "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "tensorboard.main", *options]


def _place(name: str | None, run: str | None) -> str:
    """What a board shows; unlike for `chosen`, a path or URI need not be that of a run."""
    if name is None:
        return storage()
    if "/" in name:
        return name if is_uri(name) else str(Path(name).resolve())
    root = storage()
    found = find_run(root, name, run or "latest")
    return found.place if run else joined(root, name)
