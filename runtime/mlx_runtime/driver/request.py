"""The run that a command refers to: a new run, a run to resume, or a checkpoint to evaluate."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.config.composition import Composition, Config, check, quote, read, storage_override
from mlx_runtime.config.constructors.signatures import settings_of
from mlx_runtime.config.constructors.targets import names_repositories
from mlx_runtime.config.interpolation import escape, parse_config, values_by_key
from mlx_runtime.config.projects import CONF
from mlx_runtime.errors import ConfigError, StorageError, UsageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.checkpoints.index import list_checkpoints
from mlx_runtime.runs.folder import RunFolder, list_runs, named_run, names_run, read_errors, refuse_empty
from mlx_runtime.storage.files import join_path, prepared_root, storage_root
from mlx_runtime.storage.local import IrregularError
from mlx_runtime.storage.redaction import LEFT_OUT
from mlx_runtime.workers.stop_requests import StopRequests, sigterm_stops

if TYPE_CHECKING:
    from mlx_runtime.loop.resuming import Change

FAST_DEV_RUN = "--fast-dev-run"

OPTIONS = {"--run": "claimed", "--from": "origin", "--resume": "resume", "--eval": "checkpoint"}
"""The field of a `Request` for each other option of main.py."""

FLAGS = {
    "--prepare-batches": "cfg.preparation.mode=make",
    "--no-prepared": "cfg.preparation.mode=never",
    "--profile": "++cfg.debug.profile=true",
}
VALUES = {"--overfit": "++cfg.debug.overfit_batches=", "--variant": "--variant="}
"""Overrides for the other options of `mlx train run`, without and with a value. `++` adds a setting that an older
conf.yaml lacks."""

FAST = (
    *("++cfg.debug.limit_batches=2", "cfg.start_epoch=0", "cfg.num_epochs=1"),
    *("cfg.resume=null", "cfg.restore_checkpoint_path=null"),
)
"""Overrides implied by `--fast-dev-run`; those on the command line take precedence."""


@dataclass(frozen=True)
class Request:
    """A run to start, resume or evaluate. Runs are given by name, path or URI, or as `latest`."""

    overrides: tuple[str, ...] = ()  # Hydra's, and `--variant=NAME`
    resume: str | None = None  # run to resume
    origin: str | None = None  # run whose conf.yaml a new run starts with, or whose checkpoint is evaluated
    claimed: str | None = None  # run to start in its claimed folder, or to resume if it has begun
    checkpoint: str | None = None  # path or URI of the checkpoint to evaluate
    fast: bool = False  # apply `FAST`, and keep nothing

    def __post_init__(self) -> None:
        refuse_empty({option: getattr(self, name) for option, name in OPTIONS.items()})

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Request":
        """Parse the options of `mlx train run`, and overrides.

        The value of an option may be the next word. A missing run is `latest`.
        """
        fields, overrides = dict[str, Any](), list[str]()
        for before, word in zip(["", *words], words, strict=False):
            option, mark, value = word.partition("=")
            if option in OPTIONS:
                fields[OPTIONS[option]] = value if mark else "latest"
            elif before in OPTIONS and names_run(word):
                fields[OPTIONS[before]] = word
            elif word in FLAGS or (option in VALUES and mark) or before in VALUES:
                overrides.append(FLAGS.get(word) or VALUES[option if mark else before] + (value if mark else word))
            elif word not in (FAST_DEV_RUN, *VALUES):
                if word.startswith("--"):
                    known = ", ".join([*OPTIONS, FAST_DEV_RUN, *FLAGS, *VALUES])
                    raise UsageError(f"there is no option {word}; there are {known}, and overrides: key=value")
                overrides.append(word)
        return cls(tuple(overrides), **fields, fast=FAST_DEV_RUN in words)

    @property
    def words(self) -> list[str]:
        """Arguments of main.py."""
        options = [f"{option}={value}" for option, name in OPTIONS.items() if (value := getattr(self, name))]
        return [*options, *[FAST_DEV_RUN] * self.fast, *self.overrides]

    def __iter__(self) -> Iterator[str]:
        """Iterate over these arguments, for a main.py that adds some: `[*overrides, "cfg.seed=1"]`."""
        return iter(self.words)


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
    """The run that the request and conf.yaml choose; `run`, `claimed` and `origin` are as in `RunConfig`."""

    run: RunFolder | None = None
    claimed: RunFolder | None = None
    origin: RunFolder | None = None
    implied: tuple[str, ...] = ()  # overrides that follow from the choice
    declared: bool = False  # chosen by `cfg.resume=auto` in conf.yaml, so conf.yaml applies to it, too
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
        overrides: Hydra's overrides, and options. `--resume=RUN` resumes a run, like `cfg.resume=RUN`. `--from=RUN`
            starts a new run. Both read the conf.yaml of that run. `--run=RUN` starts a run that was only claimed, or
            else resumes it. `--fast-dev-run` means `FAST`, in temporary storage that is removed at the end.
            `--eval=CHECKPOINT` evaluates a checkpoint of the run after `--from`. `--variant=NAME` applies
            `variants/NAME.yaml`. Commands pass all of these as one object.
        path: path of conf.yaml.
        keys_only: check only the keys and the runtime's settings, on a machine that cannot import the code.
        title: name of the file in messages; by default, its path.

    Raises:
        ConfigError: conf.yaml or overrides are wrong, with one line per problem, or an unpinned repository of the
            Hugging Face Hub cannot be found.
        UsageError: there is no such run, or options exclude each other.
        RunFinished: the run to resume has succeeded, and no more epochs or steps are requested.
    """
    request = overrides if isinstance(overrides, Request) else Request.parse(overrides)
    typed = (*FAST, *request.overrides) if request.fast else request.overrides
    settings, checkpoint = settings_of(experiment), request.checkpoint
    composition = read(path, typed, settings, title)
    choice = choose_run(request, experiment, composition, mirrors=not (keys_only or request.fast))
    implied, run = choice.implied, choice.run
    if checkpoint is not None:
        implied = (*implied, f"++cfg.restore_checkpoint_path={quote(escape(checkpoint))}", "++cfg.restore_strict=true")
    if request.fast and run is not None:
        raise UsageError(f"{FAST_DEV_RUN} keeps nothing, so it cannot resume a run; leave out --resume")
    changes: tuple[Change, ...] = ()
    source = run or choice.origin
    with _conf_of(source) as conf:
        read_from = path if choice.declared or conf is None else conf
        title = join_path(source.location, source.conf.name) if source and read_from is not path else title
        if implied:
            composition = read(read_from, [*typed, *implied], settings, title, path)
        config = check(experiment, composition, keys_only=keys_only)
        if run is not None or choice.origin is not None:
            _refuse_hidden(config)
        if run is not None and conf is not None:
            from mlx_runtime.loop import resuming

            resuming.check_stored(run, conf)
        if not keys_only and is_remote(str(getattr(config.cfg, "restore_checkpoint_path", None))):
            pin_checkpoint(config)
        if not keys_only and names_repositories(config.tree):
            file = parse_config(read_from.read_text(encoding="utf-8"))
            before = parse_config(conf.read_text(encoding="utf-8")) if run is not None and conf is not None else {}
            companions.part("hub.pins").pin_revisions(config.tree, config.unresolved, file, before)
        if run is not None:
            assert conf is not None
            another = new_run(run, config.cfg)
            if choice.declared:  # the same command is repeated, perhaps after conf.yaml has changed
                resuming.refuse_finished(run, conf, config.cfg, another, declared=True)
            changes = resuming.allowed_changes(run, conf, config, another)
            if not choice.declared:
                resuming.refuse_finished(run, conf, config.cfg, another, declared=False)
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
    """Choose the run by the request and `cfg.resume`, and download it if its mirror is ahead.

    The config is checked before a download. Without `mirrors`, they are ignored.
    """
    composed = composition.tree.get("cfg")
    cfg = composed if isinstance(composed, dict) else {}  # its problems are reported later
    storage, experiment = str(cfg.get("storage_path", "runs")), str(cfg.get("name", "experiment"))
    root, choice = storage_root(storage), _Choice()
    claimed = named_run(request.claimed, root, experiment) if request.claimed else None
    if claimed is not None and claimed.has_begun():
        claimed = None
    if request.origin and request.resume:
        raise UsageError("--resume resumes a run and --from starts a new one; give one of them")
    if request.origin or claimed:
        origin = None
        if request.origin and is_remote(request.origin):
            origin = reader_of(request.origin).find(request.origin).fetch()
        elif request.origin:
            origin = named_run(request.origin, root, experiment)
        implied = ("cfg.resume=null", storage_override(claimed.root if claimed else storage))
        return choice._replace(claimed=claimed, origin=origin, implied=implied)
    name = request.resume or request.claimed or cfg.get("resume")
    for companion in companions.extensions_of(cfg) if name == "auto" and mirrors else ():
        check(cls, composition)
        with sigterm_stops(StopRequests()):  # an interrupted download is removed
            latest, notes = companion.latest(cfg, root, experiment)
        choice = choice._replace(notes=(*choice.notes, *notes))
        name = latest.name if latest is not None else name
    if name in ("auto", "latest"):
        runs = reversed(list_runs(root, experiment))
        begun = (run.name for run in runs if run.has_begun() and not run.in_sweep())  # others died at once
        name = next(begun, "" if name == "auto" else name)
    if not name or name is True:  # data jobs resume themselves
        return choice
    try:
        run = named_run(str(name), root, experiment)
    except UsageError as error:
        if not request.resume and not request.claimed:
            error.hint = "cfg.resume is auto (the latest run, or a new one if there is none), latest, or a run"
        raise
    declared = cfg.get("resume") == "auto" and not request.resume
    return choice._replace(run=run, implied=(storage_override(run.root),), declared=declared)


@contextlib.contextmanager
def _conf_of(folder: RunFolder | None) -> Iterator[Path | None]:
    """Provide the conf.yaml of a run as a local file within the block."""
    if folder is None:
        yield None
        return
    try:
        with read_errors(folder, folder.conf.name):
            content = folder.document(folder.conf.name)
            if not content.strip():
                raise ValueError("it is empty")
    except StorageError as error:
        if not isinstance(error.__cause__, ValueError | FileNotFoundError | IsADirectoryError | IrregularError):
            raise
        saved = list_checkpoints(folder.checkpoints)
        weights = f" with cfg.restore_checkpoint_path={join_path(folder.checkpoints, saved[-1].name)}" if saved else ""
        raise StorageError(f"{error}. Put a good copy back, or start a new run{weights}") from error
    if folder.uri is None:
        yield folder.conf
        return
    with tempfile.TemporaryDirectory() as temporary:
        conf = Path(temporary, folder.conf.name)
        conf.write_bytes(content)
        yield conf


def pin_checkpoint(config: Config) -> None:
    """Pin a mirror to start from to its current state, because a new one may be uploaded while workers start."""
    uri = str(config.cfg.restore_checkpoint_path)
    pinned_uri = reader_of(uri).pin_checkpoint(uri)
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
