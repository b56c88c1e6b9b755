"""The run that a command refers to: a new run, a run to resume, or a checkpoint to evaluate."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.config import Config, load, parsed, quoted, read, storage_override
from mlx_runtime.config.constructors import names_repositories, settings_of
from mlx_runtime.config.projects import CONF
from mlx_runtime.config.variants import values_by_key
from mlx_runtime.errors import ConfigError, StorageError, UsageError
from mlx_runtime.runs import RunFolder, list_runs, named_run, names_run, reading, refuse_empty, snapshots
from mlx_runtime.runs.checkpoints import list_checkpoints
from mlx_runtime.storage import joined, prepared_root, storage_root
from mlx_runtime.storage.local import IrregularError
from mlx_runtime.storage.secrets import LEFT_OUT
from mlx_runtime.training.options import TrainConfig
from mlx_runtime.training.stop_requests import StopRequests, sigterm_stops

if TYPE_CHECKING:
    from mlx_runtime.training.resuming import Change

FAST_DEV_RUN = "--fast-dev-run"

EVAL = "--eval="
"""Prefix of the path of a checkpoint to evaluate; `--from=` names its run."""

FAST = (
    *("++cfg.debug.limit_batches=2", "cfg.start_epoch=0", "cfg.num_epochs=1"),
    *("cfg.resume=null", "cfg.restore_checkpoint_path=null"),
)
"""Overrides implied by `--fast-dev-run`; those on the command line take precedence."""


@dataclass(frozen=True)
class RunConfig(Config):
    """A checked config, and its run."""

    run: RunFolder | None = None  # run to resume; None for a new one
    claimed: RunFolder | None = None  # folder that was created for this run, which has not begun yet
    origin: RunFolder | None = None  # run whose conf.yaml this is instead of the experiment's
    changes: "tuple[Change, ...]" = ()  # differences from the config that the run had before
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
    """The run that the command line and conf.yaml choose; `run`, `claimed` and `origin` are as in `RunConfig`."""

    overrides: tuple[str, ...]  # Hydra overrides, as typed
    run: RunFolder | None = None
    claimed: RunFolder | None = None
    origin: RunFolder | None = None
    implied: tuple[str, ...] = ()  # overrides that follow from the choice
    declared: bool = False  # chosen by `cfg.resume=auto` in conf.yaml, so conf.yaml applies to it, too
    notes: tuple[str, ...] = ()


def load_config(
    experiment: type,
    overrides: Sequence[str] = (),
    path: Path = CONF,
    *,
    look: bool = False,
    title: str | None = None,
) -> RunConfig:
    """Read conf.yaml, apply Hydra overrides, and check the result against the constructors.

    Args:
        experiment: class of the experiment.
        overrides: Hydra's overrides, and options. `--resume=RUN` resumes a run, like `cfg.resume=RUN`. `--from=RUN`
            starts a new run. Both read the conf.yaml of that run. `--run=RUN` starts a run that was only claimed, or
            else resumes it. `--fast-dev-run` means `FAST`, in temporary storage that is removed at the end.
            `--eval=CHECKPOINT` evaluates a checkpoint of the run after `--from`. `--variant=NAME` applies
            `variants/NAME.yaml`.
        path: path of conf.yaml.
        look: run no code that is named only in conf.yaml. It is not imported, `cfg` has the runtime's class, without
            your own fields, and trackers and callbacks are not built.
        title: name of the file in messages; by default, its path.

    Raises:
        ConfigError: conf.yaml or overrides are wrong, with one line per problem, or an unpinned repository of the
            Hugging Face Hub cannot be found.
        UsageError: there is no such run, or options exclude each other.
        RunFinished: the run to resume has succeeded, and no more epochs or steps are requested.
    """
    fast = FAST_DEV_RUN in overrides
    if fast:
        overrides = [*FAST, *(item for item in overrides if item != FAST_DEV_RUN)]
    checkpoint = next((item.removeprefix(EVAL) for item in overrides if item.startswith(EVAL)), None)

    def check(typed: Sequence[str]) -> None:
        load(experiment, typed, path, look=True, title=title, project=path)

    typed = [item for item in overrides if not item.startswith(EVAL)]
    choice = _choose(path, typed, settings_of(experiment), check, look=look or fast)
    implied, run = choice.implied, choice.run
    if checkpoint is not None:
        implied = (*implied, f"++cfg.restore_checkpoint_path={quoted(checkpoint)}", "++cfg.restore_strict=true")
    if fast and run is not None:
        raise UsageError(f"{FAST_DEV_RUN} keeps nothing, so it cannot resume a run; leave out --resume")
    changes: tuple[Change, ...] = ()
    source = run or choice.origin
    with _conf_of(source) as conf:
        read_from = path if choice.declared or conf is None else conf
        title = f"{source.location}/{source.conf.name}" if source and read_from is not path else title
        words = [*choice.overrides, *implied]
        with _way_out(experiment, run is not None or checkpoint is not None):
            config = load(experiment, words, read_from, look=look, title=title, project=path)
        if run is not None or choice.origin is not None:
            _refuse_hidden(config)
        if run is not None and conf is not None:
            from mlx_runtime.training import resuming

            resuming.check_stored(run, conf)
        if not look and is_remote(str(getattr(config.cfg, "restore_checkpoint_path", None))):
            _pin_checkpoint(config)
        if not look and names_repositories(config.tree):
            file = parsed(read_from.read_text(encoding="utf-8"))
            before = parsed(conf.read_text(encoding="utf-8")) if run is not None and conf is not None else {}
            companions.part("hub.pins").pinned(config.tree, config.unresolved, file, before)
        if run is not None:
            assert conf is not None
            another = new_run(run, config.cfg)
            if choice.declared:  # the same command is repeated, perhaps after conf.yaml has changed
                resuming.refuse_finished(run, conf, config.cfg, another, declared=True)
            changes = resuming.allowed(run, conf, config, another)
            if not choice.declared:
                resuming.refuse_finished(run, conf, config.cfg, another, declared=False)
    return RunConfig(
        **{**vars(config), "overrides": choice.overrides},
        run=run,
        claimed=choice.claimed,
        origin=choice.origin,
        changes=changes,
        fast=fast,
        checkpoint=checkpoint,
        notes=choice.notes,
    )


@contextlib.contextmanager
def _way_out(experiment: type, has_code: bool) -> Iterator[None]:
    """Add a hint about the stored code of the run to an error of the config, unless that code is used already."""
    try:
        yield
    except ConfigError as error:
        if has_code and error.problems and not snapshots.is_unpacked(snapshots.project_of(experiment)):
            error.hint = "if the code has changed since that run, use the code that it stored: add --code=stored"
        raise


def _choose(
    path: Path,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    check: Callable[[Sequence[str]], object] = lambda typed: None,
    *,
    look: bool = False,
) -> _Choice:
    """Choose the run by `--resume`, `--from`, `--run` and `cfg.resume`, and download it if its mirror is ahead.

    `check` is called with the overrides before a download. With `look`, mirrors are ignored.
    """
    options, typed = _options(overrides)
    composed = read(path, typed, settings).tree.get("cfg")
    cfg = composed if isinstance(composed, dict) else {}  # its problems are reported later
    storage, experiment = str(cfg.get("storage_path", "runs")), str(cfg.get("name", "experiment"))
    root, choice = storage_root(storage), _Choice(tuple(typed))
    claimed = named_run(options["--run"], root, experiment) if options["--run"] else None
    if claimed is not None and claimed.has_begun():
        claimed = None
    if options["--from"] and options["--resume"]:
        raise UsageError("--resume resumes a run and --from starts a new one; give one of them")
    if options["--from"] or claimed:
        origin = None
        if is_remote(options["--from"]):
            origin = reader_of(options["--from"]).find(options["--from"]).cached()
        elif options["--from"]:
            origin = named_run(options["--from"], root, experiment)
        implied = ("cfg.resume=null", storage_override(claimed.root if claimed else storage))
        return choice._replace(claimed=claimed, origin=origin, implied=implied)
    name = options["--resume"] or options["--run"] or cfg.get("resume")
    for companion in companions.asked_for(cfg) if name == "auto" and not look else ():
        check(typed)
        with sigterm_stops(StopRequests()):  # an interrupted download is removed
            latest, notes = companion.latest(cfg, root, experiment)
        choice = choice._replace(notes=(*choice.notes, *notes))
        name = latest.name if latest is not None else name
    if name in ("auto", "latest"):
        runs = reversed(list_runs(root, experiment))
        begun = (run.name for run in runs if run.has_begun() and not run.in_sweep())  # others died at once
        name = next(begun, "" if name == "auto" else name)
    if not name:
        return choice
    run = named_run(str(name), root, experiment)
    declared = cfg.get("resume") == "auto" and not options["--resume"]
    return choice._replace(run=run, implied=(storage_override(run.root),), declared=declared)


def _options(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the runs given by `--resume`, `--from` and `--run`, or empty strings, and the remaining overrides.

    The name of the run may follow an option as a separate word; without a name, it is `latest`.
    """
    options = {"--resume": "", "--from": "", "--run": ""}
    typed: list[str] = []
    open_option = ""
    for item in overrides:
        name, mark, value = item.partition("=")
        if name in options:
            refuse_empty({name: value if mark else None})
            options[name], open_option = value or "latest", "" if value else name
        elif open_option and names_run(item):
            refuse_empty({open_option: item})
            options[open_option], open_option = item, ""
        else:
            typed.append(item)
            open_option = ""
    return options, typed


@contextlib.contextmanager
def _conf_of(folder: RunFolder | None) -> Iterator[Path | None]:
    """Provide the conf.yaml of a run as a local file within the block."""
    if folder is None:
        yield None
        return
    try:
        with reading(folder, folder.conf.name):
            content = folder.document(folder.conf.name)
            if not content.strip():
                raise ValueError("it is empty")
    except StorageError as error:
        if not isinstance(error.__cause__, ValueError | FileNotFoundError | IsADirectoryError | IrregularError):
            raise
        saved = list_checkpoints(folder.checkpoints)
        weights = f" with cfg.restore_checkpoint_path={joined(folder.checkpoints, saved[-1].name)}" if saved else ""
        raise StorageError(f"{error}. Put a good copy back, or start a new run{weights}") from error
    if folder.uri is None:
        yield folder.conf
        return
    with tempfile.TemporaryDirectory() as temporary:
        conf = Path(temporary, folder.conf.name)
        conf.write_bytes(content)
        yield conf


def _pin_checkpoint(config: Config) -> None:
    """Pin a mirror to start from to its current state, because a new one may be uploaded while workers start."""
    uri = str(config.cfg.restore_checkpoint_path)
    pinned_uri = reader_of(uri).pinned_checkpoint(uri)
    config.cfg.restore_checkpoint_path = pinned_uri
    for tree in (config.tree, config.unresolved):
        tree["cfg"]["restore_checkpoint_path"] = pinned_uri


def _refuse_hidden(config: Config) -> None:
    """Raise a ConfigError if the conf.yaml comes from a mirror, without its secrets."""
    leaves = values_by_key(config.unresolved).items()
    if hidden := [key for key, value in leaves if isinstance(value, str) and LEFT_OUT.search(value)]:
        raise ConfigError(
            f"the mirror of the run does not hold the secret {', '.join(hidden)}; pass it again, like {hidden[0]}=…, "
            "or read it from the environment: ${oc.env:NAME}"
        )


def new_run(run: RunFolder, cfg: TrainConfig) -> str:
    """Return an instruction for starting a new run with the settings of a run that cannot resume."""
    if hasattr(cfg, "function"):  # of `Trainer`
        return "leave out resume=, or give the Trainer another name="
    return f"mlx train run --from {run.title}"
