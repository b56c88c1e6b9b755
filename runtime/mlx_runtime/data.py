"""The verbs of `mlx data`: fill the storage, look at what is in it, take away what nobody needs."""

import functools
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import projects, xp
from mlx_runtime.cluster import JOB_FLAG
from mlx_runtime.errors import ClusterError, UsageError
from mlx_runtime.layout import job_folder, prepared_root, storage_root
from mlx_runtime.projects import DATA_JOB
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.contents import Place, Survey
    from mlx_runtime.loading import Config
    from mlx_runtime.prepared import Found, Store

SHOWN = "mlx-show "
"""What a survey's line in the log of a job begins with."""

SHOW_S = 600.0
"""How long a cluster has to measure its storage."""


def new(name: str, output: Path) -> Path:
    """Generate a data job from the template that came with this package; needs no network.

    Returns:
        The new folder.

    Raises:
        UsageError: the name cannot be one, or the folder exists.
    """
    return projects.new(DATA_JOB, name, output)


def bind(*, check: bool = False, diff: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` of the data job in the working directory; see `projects.bind`.

    Raises:
        UsageError: this is no data job.
        BindError: a constructor that conf.yaml cannot describe; with `check`, a file that is not up to date.
    """
    return projects.bind(DATA_JOB, check=check, diff=diff)


def run(overrides: Sequence[str]) -> None:
    """Run the data job in the working directory on this machine: its `main.py` with these overrides.

    Raises:
        UsageError: this is no data job, or what it would make is there already.
    """
    folder = job_folder()
    projects.refuse_options(DATA_JOB, overrides, "run")
    _config(folder, overrides)
    projects.run(DATA_JOB, overrides)


def launch(
    overrides: Sequence[str],
    *,
    ray_address: str | None = None,
    check: bool = False,
    follow: bool = False,
    pip: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Run the data job in the working directory on a cluster.

    Args:
        overrides: as for `run`.
        ray_address: of the cluster; else `RAY_ADDRESS`. See `jobs.Address`.
        check: only look whether it would run, and tell everything that was found.
        follow: pass on what the job prints until it has ended.
        pip: let the cluster install what requirements.txt names.
        say: takes lines for the user.

    Returns:
        The exit code: with `follow` the job's, else 0.

    Raises:
        UsageError: this is no data job, or there is no address.
        ClusterError: it would not run there, or died as it began.
    """
    folder = job_folder()
    projects.refuse_options(DATA_JOB, overrides, "launch")
    from mlx_runtime.datajob import place_of
    from mlx_runtime.filling import being_filled
    from mlx_runtime.jobs import Address
    from mlx_runtime.launch import Launch
    from mlx_runtime.loading import storage_override

    address = Address.of(ray_address)
    launch = Launch(folder, address, functools.partial(_config, folder, overrides, look=check), pip=pip)
    launch.passed(say, everything=check)
    if check:
        return 0
    assert launch.jobs is not None, "a cluster that does not answer was told about"
    assert launch.config is not None, "and so was a config"
    cfg: Any = launch.config.cfg
    place, job = place_of(cfg), launch.jobs.named(f"data-{cfg.name}")
    there = storage_override(storage_root(cfg.storage_path))
    made = launch.send([*overrides, there], job, {"mlx": "data", "name": cfg.name, "folder": place})
    say(f"job       {job}")
    say(f"folder    {place}")
    say(f"dashboard {made.dashboard}")
    for verb, title in (("logs --follow", "follow"), ("stop", "stop")):
        say(f"{title:<9} RAY_ADDRESS={address.url} ray job {verb} {job}")
    if follow:
        return made.follow()
    say(f"status    {made.wait(lambda: being_filled(place)).status}")
    return 0


def _config(folder: Path, overrides: Sequence[str], *, look: bool = False) -> "Config":
    """The checked config of a data job that may be run."""
    projects.bind_first(DATA_JOB, folder)
    job = projects.main_class(DATA_JOB, folder)
    from mlx_runtime import datajob, loading

    config = loading.load_config(job, overrides, look=look)
    datajob.refuse_present(config)
    return config


def show(path: str | None, depth: int, limit: int, ray_address: str | None = None) -> "Survey":
    """Measure the storage of the folder here, or a part of it, where need be as the cluster sees it.

    Args:
        path: below the storage; None for all of it.
        depth: levels to list.
        limit: entries to list of each folder; 0 for all.
        ray_address: of a cluster that has the storage, when this machine has not; else `RAY_ADDRESS`.

    Raises:
        UsageError: nothing says where the storage is, or there is no such path in it.
        StorageError: the storage does not answer.
        ClusterError: the cluster does not answer.
    """
    from mlx_runtime import contents
    from mlx_runtime.storage import is_uri

    root = xp.storage()
    if is_uri(root) or Path(root).is_dir():
        return contents.survey(contents.place_in(root, path), depth, limit)
    if JOB_FLAG in os.environ or not (ray_address or os.environ.get("RAY_ADDRESS")):
        raise UsageError(
            f"there is no {root} on this machine; if only a cluster has it, say which: --ray-address http://HEAD:8265"
        )
    options = ["--depth", str(depth), "--limit", str(limit), *([path] if path else [])]
    return contents.Survey.of_json(_shown_there(root, options, ray_address))


def _shown_there(root: str, options: Sequence[str], ray_address: str | None) -> Any:
    """What `mlx data show --json` prints as a job on a cluster.

    Raises:
        UsageError: what it says is wrong with the arguments.
        ClusterError: the cluster does not answer, or not in time.
    """
    from mlx_runtime.jobs import Address, Jobs, reached
    from mlx_runtime.uploads import Upload

    jobs = Jobs(reached(Address.of(ray_address)))
    job = f"mlx-show-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as empty, Upload.of(Path(empty)).staged() as folder:
        jobs.submit(
            ["python", "-u", "-m", "mlx_runtime", "data", "show", "--json", *options],
            job=job,
            folder=folder,
            environment={JOB_FLAG: "1", "MLX_STORAGE": root},
            metadata={"mlx": "show"},
            runtime_env={},
        )
    until = time.monotonic() + SHOW_S
    while not (details := jobs.details(job)).ended:
        if time.monotonic() > until:
            jobs.stop(job)
            raise ClusterError(f"the cluster has not measured {root} within {SHOW_S:.0f} s; name a folder in it")
        time.sleep(0.2)
    log = jobs.log(job)
    for line in log.splitlines():
        if line.startswith(SHOWN):
            jobs.forget(job)
            return json.loads(line.removeprefix(SHOWN))
    told = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    if told:
        raise UsageError(f"on the cluster {told[-1]}")
    raise ClusterError(f"the job {job} says nothing of {root}: {details.reason}")


def removable(path: str) -> "tuple[Place, Survey]":
    """A file or folder of the storage that may be removed, measured.

    Args:
        path: below the storage.

    Raises:
        UsageError: it is not there, lies outside the storage, is a run, or somebody is using it.
        StorageError: the storage does not answer.
    """
    from mlx_runtime import contents

    place = contents.place_in(xp.storage(), path)
    found = contents.survey(place, 0, 0)
    contents.refuse_in_use(place, found)
    return place, found


def remove(place: "Place", found: "Survey") -> None:
    """Remove what `removable` found, if it is still the same: a person may have thought about it for long.

    Raises:
        UsageError: it has changed, or somebody uses it by now; nothing was removed.
        StorageError: not all of it could be removed.
    """
    from mlx_runtime import contents

    again, present = removable(place.title)
    if again != place or present.top != found.top:
        raise UsageError(
            f"{place.title} has changed since it was measured; nothing was removed. See it with: "
            f"mlx data show {'/'.join(place.parts)}"
        )
    contents.remove(place)


def prepared_store() -> "Store":
    """The prepared sets of the experiment here, or of `MLX_STORAGE`.

    Raises:
        UsageError: neither says where they are.
    """
    storage, path = Settings.read().storage, xp.configured("cfg.prepared_path")
    if storage is None:
        storage = xp.configured("cfg.storage_path")
    if storage is None and path is None:
        raise UsageError("which storage? Change into an experiment, or set MLX_STORAGE=FOLDER")
    from mlx_runtime.prepared import Store

    return Store(prepared_root(storage or "", path))


def unwanted_prepared(store: "Store", older_than_days: float, larger_than_gb: float) -> "list[Found]":
    """Prepared sets to remove: unused for longer, and the longest unused ones of all that are larger together."""
    return store.unwanted(max_age_s=older_than_days * 86_400, max_bytes=larger_than_gb * 1e9)


def remove_prepared(store: "Store", sets: "list[Found]") -> "list[Found]":
    """Remove prepared sets, but not under a run's feet. Returns those that are gone."""
    return [item for item in sets if store.remove(item.name)]
