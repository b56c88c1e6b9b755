"""The verbs of `mlx train`: make an experiment, bind its config, run it."""

import importlib
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from mlx_runtime import __version__
from mlx_runtime.errors import BindError, MlxError, UsageError, first_line
from mlx_runtime.layout import CONF, experiment_folder

PACKAGED_TEMPLATE = Path(__file__).parent / "template"
CHECKOUT = Path(__file__).parents[2]


def new(name: str, output: Path) -> Path:
    """Generate an experiment from the template that came with this package; needs no network.

    Returns:
        The new folder.

    Raises:
        UsageError: the name cannot be one, or the folder exists.
    """
    from cookiecutter.exceptions import CookiecutterException
    from cookiecutter.main import cookiecutter

    check_name(name)
    folder = output / name
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name, or another place with -o")
    packaged = PACKAGED_TEMPLATE.is_dir()
    source = str(PACKAGED_TEMPLATE if packaged else CHECKOUT)
    answers = {"experiment_name": name} | ({"_runtime": f"mlx-runtime=={__version__}"} if packaged else {})
    try:
        made = cookiecutter(source, no_input=True, output_dir=str(output), extra_context=answers)
    except (CookiecutterException, OSError) as error:
        raise MlxError(f"cannot make {folder}: {error}") from error
    return Path(made)


def check_name(name: str) -> None:
    """Refuse what cannot be an experiment's name.

    Raises:
        UsageError: not letters, digits, `-` and `_` starting with a letter.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise UsageError(f"{name!r} cannot name an experiment; use letters, digits, - and _, starting with a letter")


def bind(*, check: bool = False, diff: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` of the experiment in the working directory, and its schema.

    Args:
        check: write nothing, and refuse a file that is not up to date.
        diff: write nothing, and return what would change.

    Returns:
        Lines for the user: what was written, then each change.

    Raises:
        UsageError: this is no experiment.
        BindError: a constructor that conf.yaml cannot describe; with `check`, a file that is not up to date.
    """
    folder = experiment_folder()
    import torch

    from mlx_runtime import binding

    existed = (folder / CONF).exists()
    try:
        with torch.device("meta"):  # default networks of any size take no memory
            bound = binding.bind(experiment_class(folder), CONF)
    except Exception:  # some constructors need real numbers; what is truly wrong is told by the second try
        for name in [name for name in sys.modules if name == "src" or name.startswith("src.")]:
            del sys.modules[name]
        bound = binding.bind(experiment_class(folder), CONF)
    if diff:
        return bound.diff().splitlines()
    if check:
        if bound.stale:
            raise BindError("\n  ".join([f"{CONF} is not up to date; run: mlx train bind", *bound.lines()]))
        return [f"{CONF} is up to date"]
    bound.write()
    title = "wrote" if not existed else "updated" if bound.stale else "unchanged"
    return [f"{title} {CONF}", *bound.lines()]


def show(arguments: Sequence[str], *, as_json: bool = False) -> str:
    """The config that a run would have, each changed value with where it came from.

    Args:
        arguments: Hydra overrides, before them perhaps a key to show only that part.
        as_json: `{"config": ..., "changed": {key: {"value", "from", "default"}}}` instead of YAML with comments.

    Raises:
        UsageError: this is no experiment, or the key does not exist.
        ConfigError: conf.yaml or an override cannot be read.
    """
    folder = experiment_folder()
    from mlx_runtime import origins
    from mlx_runtime.nodes import Description

    keys = [item for item in arguments[:1] if "=" not in item and not item.startswith(("~", "+"))]
    overrides = arguments[len(keys) :]
    defaults = Description(experiment_class(folder)).tree
    return origins.shown(CONF, defaults, overrides, keys[0] if keys else None, as_json=as_json)


def run(overrides: Sequence[str]) -> None:
    """Train the experiment in the working directory on this machine: its `main.py` with these overrides.

    Raises:
        UsageError: this is no experiment.
    """
    folder = experiment_folder()
    _refuse_options(overrides, "run")
    _bind_first(folder)
    experiment_class(folder)  # its errors are told better here than inside main.py
    main = folder / "main.py"
    if not main.is_file():
        raise UsageError(f"{folder} has no main.py; copy it from a new experiment: mlx train new NAME")
    sys.path.insert(0, str(folder))
    sys.argv = [str(main), *overrides]
    runpy.run_path(str(main), run_name="__main__")


def prepare(overrides: Sequence[str]) -> None:
    """Prepare the datasets of the experiment in the working directory.

    Raises:
        UsageError: this is no experiment.
        DatasetError: a dataset cannot be prepared.
    """
    folder = experiment_folder()
    _refuse_options(overrides, "prepare")
    _bind_first(folder)
    experiment = experiment_class(folder)
    from mlx_runtime import loading, trainer

    trainer.prepare(loading.load_config(experiment, [*overrides, "cfg.prepared=make"]))


def _refuse_options(overrides: Sequence[str], verb: str) -> None:
    options = [item for item in overrides if item.startswith("-") and not item.startswith(("--resume", "--from="))]
    if options:
        raise UsageError(f"there is no option {options[0]}; see: mlx train {verb} --help")


def _bind_first(folder: Path) -> None:
    """Bind if that was not done, in a process of its own: it may import what a run must not."""
    if not (folder / CONF).exists():
        print(f"no {CONF} yet: binding first", flush=True)
        done = subprocess.run([sys.executable, "-m", "mlx_runtime", "train", "bind"])
        if done.returncode:
            sys.exit(done.returncode)  # it has said why


def experiment_class(folder: Path) -> type:
    """`src.experiment.Experiment` of a folder.

    Raises:
        MlxError: it cannot be imported, or there is no such class.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("src.experiment")
    except MlxError:
        raise
    except Exception as error:
        frames = [
            item for item in traceback.extract_tb(error.__traceback__) if Path(item.filename).parent == folder / "src"
        ]
        at = f"src/{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "src/experiment.py"
        message = f"{at}: src.experiment cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise MlxError(message) from error
    found = getattr(module, "Experiment", None)
    if not isinstance(found, type):
        raise UsageError("src/experiment.py has no class Experiment; write: class Experiment(BaseModule)")
    return found
