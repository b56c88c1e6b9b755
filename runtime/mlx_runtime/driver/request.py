"""The run that a command refers to: a new run, a run to resume, or a checkpoint to evaluate."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.config.composition import Composition, Config, check, quote, read, storage_override
from mlx_runtime.config.constructors.signatures import settings_of
from mlx_runtime.config.constructors.targets import names_repositories
from mlx_runtime.config.interpolation import escape, parse_config
from mlx_runtime.config.projects import CONF
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import RunFolder, list_runs, named_run, read_errors
from mlx_runtime.storage.files import join_path, prepared_root, storage_root
from mlx_runtime.storage.local import IrregularError, write_atomic
from mlx_runtime.workers.placement import is_launched
from mlx_runtime.workers.stop_requests import StopRequests, sigterm_stops

if TYPE_CHECKING:
    from mlx_runtime.loop.resuming import Change

_CHECKPOINT = re.compile(r"latest|best|epoch_\d+(_step_\d+)?")

FAST = (
    *("++cfg.debug.limit_batches=2", "cfg.start_epoch=0", "cfg.num_epochs=1"),
    "cfg.restore_checkpoint_path=null",
)
"""Overrides implied by `--fast-dev-run`; those on the command line take precedence."""


@dataclass(frozen=True)
class RunConfig(Config):
    """A checked config, and its run."""

    run: RunFolder | None = None  # run to resume; None for a new one
    claimed: RunFolder | None = None  # folder that was created for this run, which has not begun yet
    origin: RunFolder | None = None  # run whose conf.yaml this is instead of the experiment's
    changes: "tuple[Change, ...]" = ()  # differences from the former config of the run, or of the one it starts from
    fast: bool = False  # run a few batches to check that all code works, and keep nothing
    checkpoint: str | None = None  # evaluate this one instead of training; only `origin` keeps the result
    sweep: Mapping[str, Any] | None = None  # for the record of a new run of a sweep: name, trial, fold and values
    notes: tuple[str, ...] = ()  # lines for the user about the choice of the run

    @property
    def kept(self) -> bool:
        """True if the run stays in the storage."""
        return not self.fast and self.checkpoint is None

    @property
    def prepared_root(self) -> str:
        """Folder or URI of prepared datasets."""
        return prepared_root(self.cfg.storage_path, self.cfg.preparation.path)


class _Choice(NamedTuple):
    """The run that a request chooses; `run`, `claimed` and `origin` are as in `RunConfig`."""

    run: RunFolder | None = None
    claimed: RunFolder | None = None
    origin: RunFolder | None = None
    typed: tuple[str, ...] = ()  # overrides that the user could have typed
    implied: tuple[str, ...] = ()  # overrides that follow from the choice
    notes: tuple[str, ...] = ()


def load_config(
    experiment: type,
    overrides: Sequence[str] | Request = (),
    path: Path = CONF,
    *,
    keys_only: bool = False,
    title: str | None = None,
) -> RunConfig:
    """Read conf.yaml, apply Hydra overrides, and check the result against the constructors.

    Args:
        experiment: class of the experiment.
        overrides: Hydra's overrides, and options. `--resume=RUN` resumes a run; `--resume=auto` resumes the latest
            one, or starts a new run if there is none. `--from=RUN` starts a new run, and `--from=RUN@CHECKPOINT` from a
            checkpoint of that run. All of these read the conf.yaml of that run. `--fast-dev-run` means `FAST`, in
            temporary storage that is removed at the end. `--variant=NAME` applies `variants/NAME.yaml`. Commands pass
            all of these as one object.
        path: path of conf.yaml.
        keys_only: check only the keys and the runtime's settings, on a machine that cannot import the code.
        title: name of the file in messages; by default, its path.

    Raises:
        ConfigError: conf.yaml or overrides are wrong, with one line per problem, or an unpinned repository of the
            Hugging Face Hub cannot be found.
        UsageError: there is no such run, or options exclude each other.
        RunFinished: the run to resume has succeeded, and no more epochs or steps are requested.

    In a process that torchrun has started with a rank above 0, this trains, and does not return.
    """
    request = overrides if isinstance(overrides, Request) else Request.parse(overrides)
    if is_launched():
        companions.part("torchrun.worker").follow()
    typed = (*FAST, *request.overrides) if request.fast else request.overrides
    settings, checkpoint = settings_of(experiment), request.checkpoint
    composition = read(path, typed, settings, title)
    choice = choose_run(request, experiment, composition, mirrors=not (keys_only or request.fast))
    typed, implied, run = (*typed, *choice.typed), choice.implied, choice.run
    if checkpoint is not None:
        implied = (*implied, start_from(checkpoint))
    if is_launched() and not any(item.lstrip("+").startswith("cfg.start_workers=") for item in typed):
        implied = (*implied, f"cfg.start_workers={os.environ['WORLD_SIZE']}")
    if request.fast and run is not None:
        raise UsageError("--fast-dev-run keeps nothing, so it cannot resume a run; leave out --resume")
    changes: tuple[Change, ...] = ()
    source, project = run or choice.origin, path
    if source is not None:
        path, title = _conf_of(source), join_path(source.location, source.conf.name)
    if choice.typed or implied:
        composition = read(path, [*typed, *implied], settings, title, project)
    config = check(experiment, composition, keys_only=keys_only)
    if not keys_only and is_remote(str(getattr(config.cfg, "restore_checkpoint_path", None))):
        pin_checkpoint(config)
    if not keys_only and names_repositories(config.tree):
        file = parse_config(path.read_bytes())
        companions.part("hub.pins").pin_revisions(config.tree, config.unresolved, file, file if run is not None else {})
    if run is not None:
        from mlx_runtime.loop import resuming

        changes = resuming.allowed_changes(run, path, config, new_run(run, config.cfg))
        another, named = new_run(run, config.cfg, "@latest"), request.resume not in ("auto", "latest")
        resuming.refuse_finished(run, path, config.cfg, another, named=named)
    notes = [
        f"note      ignoring {', '.join(names)} of {key} in {title or path}, set for the class that was replaced"
        for key, names in composition.left_out.items()
        if names
    ]
    return RunConfig(
        **{**vars(config), "overrides": typed},
        run=run,
        claimed=choice.claimed,
        origin=choice.origin,
        changes=changes,
        fast=request.fast,
        checkpoint=checkpoint,
        notes=(*choice.notes, *notes),
    )


def choose_run(request: Request, cls: type, composition: Composition, *, mirrors: bool = True) -> _Choice:
    """Choose the run of a request, and download it if its mirror is ahead.

    The config is checked before a download. Without `mirrors`, they are ignored.
    """
    composed = composition.tree.get("cfg")
    cfg = composed if isinstance(composed, dict) else {}  # its problems are reported later
    storage, experiment = str(cfg.get("storage_path", "runs")), str(cfg.get("name", "experiment"))
    root, notes = storage_root(storage), list[str]()
    if request.origin and request.resume:
        raise UsageError("--resume resumes a run and --from starts a new one; give one of them")
    claimed = named_run(request.claimed, root, experiment) if request.claimed else None
    if claimed is not None and claimed.has_begun():
        return _Choice(run=claimed, implied=(storage_override(claimed.root),))
    if request.origin or claimed:
        origin, typed = _origin(request.origin, root, experiment) if request.origin else (None, ())
        return _Choice(None, claimed, origin, typed, (storage_override(claimed.root if claimed else storage),))
    name = request.resume
    for companion in companions.extensions_of(cfg) if name == "auto" and mirrors else ():
        check(cls, composition)
        with sigterm_stops(StopRequests()):  # an interrupted download is removed
            latest, lines = companion.latest(cfg, root, experiment)
        notes += lines
        name = latest.name if latest is not None else name
    if name in ("auto", "latest"):
        runs = reversed(list_runs(root, experiment))
        begun = (run.name for run in runs if run.has_begun() and not run.in_sweep())  # others died at once
        name = next(begun, None if name == "auto" else name)
    if name is None:
        return _Choice(notes=tuple(notes))
    run = named_run(name, root, experiment)
    return _Choice(run, implied=(storage_override(run.root),), notes=tuple(notes))


def _origin(text: str, root: str, experiment: str) -> tuple[RunFolder, tuple[str, ...]]:
    """Return the run after `--from`, and the override for the checkpoint after its `@`."""
    name, mark, which = text.rpartition("@")
    remote = is_remote(text)
    if not mark or "/" in which or (remote and not _CHECKPOINT.fullmatch(which)):  # `@` is for a revision
        name, which = text, ""
    run = reader_of(name).find(name).fetch() if remote else named_run(name, root, experiment)
    if not which:
        return run, ()
    from mlx_runtime.runs.queries.lookup import find_checkpoint  # here, because other runs do not need it

    folder = join_path(name, "checkpoints") if remote else str(run.checkpoints)
    return run, (start_from(join_path(folder, find_checkpoint(run, which).name)),)


def start_from(checkpoint: str) -> str:
    """Return the override that starts a run from a checkpoint."""
    return f"++cfg.restore_checkpoint_path={quote(escape(checkpoint))}"


def _conf_of(folder: RunFolder) -> Path:
    """Return the conf.yaml of a run; of one in an object store, a copy on this machine."""
    try:
        with read_errors(folder, folder.conf.name):
            content = folder.document(folder.conf.name)
            if not content.strip():
                raise ValueError("it is empty")
    except StorageError as error:
        if not isinstance(error.__cause__, ValueError | FileNotFoundError | IsADirectoryError | IrregularError):
            raise
        weights = f"cfg.restore_checkpoint_path={join_path(folder.checkpoints, '…')}"
        raise StorageError(f"{error}. Put a good copy back, or start a new run with {weights}") from error
    if folder.uri is None:
        return folder.conf
    copy = folder.path / ".conf.yaml"  # not in place of that of a driver on this machine
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(copy, content)
    return copy


def pin_checkpoint(config: Config) -> None:
    """Pin a mirror to start from to its current state, because a new one may be uploaded while workers start."""
    uri = str(config.cfg.restore_checkpoint_path)
    pinned_uri = reader_of(uri).pin_checkpoint(uri)
    config.cfg.restore_checkpoint_path = pinned_uri
    for tree in (config.tree, config.unresolved):
        tree["cfg"]["restore_checkpoint_path"] = pinned_uri


def new_run(run: RunFolder, cfg: TrainConfig, checkpoint: str = "") -> str:
    """Return an instruction for starting a new run with the settings of a run that cannot resume.

    `checkpoint` is the one to start from, like `@latest`, if the new run can name it.
    """
    if hasattr(cfg, "function"):  # of `Trainer`
        return "leave out resume=, or give the Trainer another name="
    return f"mlx train run --from {run.title}{checkpoint}"
