"""A generated folder, an experiment or a data job: make it from its template, bind its config, run its main.py."""

import importlib
import multiprocessing
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlx_runtime import __version__
from mlx_runtime.cluster import JOB_FLAG
from mlx_runtime.engines.processes import unsafe_to_fork
from mlx_runtime.errors import RAISED_BY_USERS, BindError, MlxError, UsageError, clean_exit, first_line, is_users
from mlx_runtime.importing import many_imports
from mlx_runtime.layout import CONF, EXPERIMENT, JOB, experiment_folder, job_folder
from mlx_runtime.settings import Settings, prepare_fork

PACKAGED = Path(__file__).parent / "template"
CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """What a folder can be.

    Attributes:
        title: for messages.
        command: group of commands, `mlx train` or `mlx data`.
        file: the file that makes a folder one.
        main: the class in that file.
        base: what it inherits.
        template: folder of the template in the repository.
    """

    title: str
    command: str
    file: Path
    main: str
    base: str
    template: str

    @property
    def question(self) -> str:
        """What the template asks for."""
        return f"{self.file.stem}_name"

    def folder(self) -> Path:
        """The working directory, which is one.

        Raises:
            UsageError: it is not.
        """
        return job_folder() if self == DATA_JOB else experiment_folder()


AN_EXPERIMENT = Kind("experiment", "mlx train", EXPERIMENT, "Experiment", "BaseModule", ".")
DATA_JOB = Kind("data job", "mlx data", JOB, "Job", "DataJob", "data_job")


def new(kind: Kind, name: str, output: Path) -> Path:
    """Generate a folder from the template that came with this package; needs no network.

    Returns:
        The new folder.

    Raises:
        UsageError: the name cannot be one, or the folder exists.
    """
    from cookiecutter.exceptions import CookiecutterException
    from cookiecutter.main import cookiecutter

    check_name(kind, name)
    folder = output / name
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name, or another place with -o")
    packaged = PACKAGED.is_dir()
    source = str((PACKAGED if packaged else CHECKOUT) / kind.template)
    answers = {kind.question: name} | ({"_runtime": f"mlx-runtime=={__version__}"} if packaged else {})
    try:
        made = cookiecutter(source, no_input=True, output_dir=str(output), extra_context=answers)
    except (CookiecutterException, OSError) as error:
        raise MlxError(f"cannot make {folder}: {error}") from error
    return Path(made)


def check_name(kind: Kind, name: str) -> None:
    """Refuse what cannot be a name.

    Raises:
        UsageError: not letters, digits, `-` and `_` starting with a letter.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        article = "an" if kind.title[0] in "aeiou" else "a"
        raise UsageError(
            f"{name!r} cannot name {article} {kind.title}; use letters, digits, - and _, starting with a letter"
        )


def bind(kind: Kind, *, check: bool = False, diff: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` of the folder that is the working directory, and its schema.

    Args:
        kind: of folder.
        check: write nothing, and refuse a file that is not up to date.
        diff: write nothing, and return what would change.

    Returns:
        Lines for the user: what was written, then each change.

    Raises:
        UsageError: this is no such folder.
        BindError: a constructor that conf.yaml cannot describe; with `check`, a file that is not up to date.
    """
    folder = kind.folder()
    import torch

    from mlx_runtime import binding

    existed = (folder / CONF).exists()
    try:
        with torch.device("meta"):  # default networks of any size take no memory
            bound = binding.bind(main_class(kind, folder), CONF)
    except Exception:  # some constructors need real numbers; what is truly wrong is told by the second try
        for name in [name for name in sys.modules if name == "src" or name.startswith("src.")]:
            del sys.modules[name]
        bound = binding.bind(main_class(kind, folder), CONF)
    if diff:
        return bound.diff().splitlines()
    if check:
        if bound.stale:
            raise BindError("\n  ".join([f"{CONF} is not up to date; run: {kind.command} bind", *bound.lines()]))
        return [f"{CONF} is up to date"]
    bound.write()
    title = "wrote" if not existed else "updated" if bound.stale else "unchanged"
    return [f"{title} {CONF}", *bound.lines()]


def bind_first(kind: Kind, folder: Path) -> None:
    """Bind if that was not done, in a process of its own: it may import what a run must not."""
    if (folder / CONF).exists():
        return
    prepare_fork()
    print(f"no {CONF} yet: binding first", flush=True)
    with many_imports():
        from mlx_runtime import binding  # noqa: F401 - with torch, before the fork: the run needs it, too
    forks = unsafe_to_fork() is None
    process: Any = cast(Any, multiprocessing.get_context("fork" if forks else "spawn")).Process(
        target=_bind_and_print, args=(kind,)
    )
    process.start()
    process.join()
    if process.exitcode < 0:
        raise MlxError(f"binding was killed by signal {-process.exitcode}")
    if process.exitcode:
        sys.exit(process.exitcode)  # it has printed why


def _bind_and_print(kind: Kind) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that waits for this one reports Ctrl-C
    with clean_exit():
        print("\n".join(bind(kind)), flush=True)


def run(kind: Kind, overrides: Sequence[str]) -> None:
    """Run what the working directory is on this machine: its `main.py` with these overrides.

    Raises:
        UsageError: this is no such folder.
    """
    folder = kind.folder()
    refuse_options(kind, overrides, "run")
    prepare_fork()
    if kind == AN_EXPERIMENT and not Settings.read().quiet:
        print(f"loading   {kind.file}", flush=True)
    bind_first(kind, folder)
    main_class(kind, folder)  # its errors are told better here than inside main.py
    if kind == AN_EXPERIMENT and JOB_FLAG not in os.environ:
        from mlx_runtime.engines import local

        local.warm_up()
    main = folder / "main.py"
    if not main.is_file():
        raise UsageError(f"{folder} has no main.py; copy it from a new {kind.title}: {kind.command} new NAME")
    sys.path.insert(0, str(folder))
    sys.argv = [str(main), *overrides]
    runpy.run_path(str(main), run_name="__main__")


def refuse_options(kind: Kind, overrides: Sequence[str], verb: str) -> None:
    """Refuse what looks like an option and is not one.

    Raises:
        UsageError: it names the first.
    """
    known: tuple[str, ...] = ("--resume", "--from=") if kind == AN_EXPERIMENT else ()
    if kind == AN_EXPERIMENT and verb == "run":
        known += ("--fast-dev-run", "--eval=")
    options = [item for item in overrides if item.startswith("-") and not item.startswith(known)]
    if options:
        raise UsageError(f"there is no option {options[0]}; see: {kind.command} {verb} --help")


def main_class(kind: Kind, folder: Path) -> type:
    """`src.experiment.Experiment` or `src.job.Job` of a folder.

    Raises:
        MlxError: it cannot be imported, or there is no such class.
    """
    name = ".".join(kind.file.with_suffix("").parts)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        with many_imports():
            module = importlib.import_module(name)
    except RAISED_BY_USERS as error:
        if isinstance(error, MlxError) and not is_users(error, folder):
            raise
        frames = [
            item for item in traceback.extract_tb(error.__traceback__) if Path(item.filename).parent == folder / "src"
        ]
        at = f"src/{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else str(kind.file)
        message = f"{at}: {name} cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise MlxError(message) from error
    found = getattr(module, kind.main, None)
    if not isinstance(found, type):
        raise UsageError(f"{kind.file} has no class {kind.main}; write: class {kind.main}({kind.base})")
    return found
