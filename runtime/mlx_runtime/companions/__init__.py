"""Companions: parts of the package that build on its core, one folder each.

The core imports none of them. It asks for their modules by name when a run or a command needs them. To remove a
companion, delete its folder and its line in this module.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlx_runtime.errors import MlxError


class Jobs(NamedTuple):
    """The jobs of a companion on clusters of its kind."""

    schemes: tuple[str, ...]  # of the addresses of such clusters
    client: str  # module with `client_of` and `job_statuses`; see `jobs.launching`
    launch: str  # words after `mlx train` that launch there
    requeues: bool = False  # a cluster may start a job that has ended again by itself


class Companion(NamedTuple):
    """The names by which the core finds a companion."""

    commands: tuple[str, ...] = ()  # the words after `mlx`; `xp push` is `xp_push` in its module `commands`
    setting: str | None = None  # in its section of `cfg`; enables its extension of runs, in its module `extension`
    scheme: str | None = None  # of the URIs of runs and checkpoints that its module `remote` reads
    jobs: Jobs | None = None


LAUNCHES = ("train launch", "data launch", "xp ray")
STORAGE = tuple(f"data {word}" for word in ("new", "bind", "run", "ls", "logs", "stop", "show", "rm"))
SERVERS = tuple(f"serve {word}" for word in ("run", "launch", "stop"))

COMPANIONS = {
    "fragments": Companion(("train clusterize",)),
    "hub": Companion(("xp push",), setting="mirror", scheme="hf"),
    "jax": Companion(),
    "jobs": Companion(STORAGE),
    "kubernetes": Companion(jobs=Jobs(("kube",), "kubernetes.kubectl", "launch --kube", requeues=True)),
    "notebook": Companion(),
    "prepared": Companion(("train prepare",)),
    "ray": Companion(LAUNCHES, jobs=Jobs(("http", "https"), "ray.dashboard", "launch")),
    "services": Companion(),
    "serving": Companion(("train predict", "xp export", *SERVERS)),
    "sharding": Companion(("xp consolidate",)),
    "slurm": Companion(jobs=Jobs(("slurm",), "slurm.queue", "launch --slurm", requeues=True)),
    "stores": Companion(),
    "surgery": Companion(("data upgrade", "train prove", "train upgrade", "xp surgery")),
    "sweeps": Companion(("train sweep",)),
    "torchrun": Companion(("train join",)),
    "ui": Companion(("train draw", "xp tag", "xp ui")),
    "views": Companion(("xp compare", "xp diff", "xp report")),
}
"""Companions by the name of their folder."""


def part(name: str) -> Any:
    """Import a module of a companion, like `hub.pins`.

    Raises:
        MlxError: the companion has been removed.
    """
    companion = name.partition(".")[0]
    if companion not in COMPANIONS:
        raise MlxError(f"this installation of mlx_runtime lacks the companion {companion!r}, which this needs")
    return importlib.import_module(f"{__name__}.{name}")


def commands(group: str) -> dict[str, str]:
    """Return the names of the commands that companions add to a group like `xp`, with their companions."""
    words = ((name, *command.rpartition(" ")[::2]) for name, item in COMPANIONS.items() for command in item.commands)
    return {command: name for name, where, command in words if where == group}


def extensions_of(cfg: Mapping[str, Any]) -> list[Any]:
    """Return the modules `extension` of the companions enabled in the node `cfg`. Each has three functions:

    extension(config)                the `RunExtension` of a run that is about to begin; it may reject the run
    latest(cfg, root, experiment)    with `--resume auto`, the run to continue or None, and lines for the user
    refuse_sweep(cfg)                raises a ConfigError if the runs of a sweep cannot have the setting
    """
    settings = {name: (cfg.get(name) or {}).get(item.setting) for name, item in COMPANIONS.items() if item.setting}
    return [part(f"{name}.extension") for name, value in settings.items() if value is not None]


def jobs_at(address: str) -> Jobs | None:
    """Return the kind of jobs on the cluster at an address like `slurm://name`; None if no companion knows it."""
    scheme = address.partition("://")[0]
    kinds = (item.jobs for item in COMPANIONS.values())
    return next((kind for kind in kinds if kind is not None and scheme in kind.schemes), None)


def is_remote(text: str) -> bool:
    """Return True if a companion can read runs or checkpoints from this URI."""
    return _reader_of(text) is not None


def reader_of(uri: str) -> Any:
    """Return the module `remote` of the companion that reads a URI for which `is_remote` is True.

    It has three functions, which raise a UsageError if there is no such run or checkpoint:

    find(uri)                the run: `record()`, `fetch()` (a copy here, without states of checkpoints),
                             `fetch_checkpoint(name)`, `held` (a driver may still write to it), `listing_folder`
    fetch_checkpoint(uri)    a copy of the run, and the name of a checkpoint that is complete in it
    pin_checkpoint(uri)      downloads a checkpoint; returns a URI of its current state, the same for all workers
    """
    return part(f"{_reader_of(uri)}.remote")


def _reader_of(uri: str) -> str | None:
    scheme, mark, _ = uri.partition("://")
    return next((name for name, item in COMPANIONS.items() if mark and item.scheme == scheme), None)
