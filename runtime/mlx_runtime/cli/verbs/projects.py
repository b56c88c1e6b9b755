"""The verbs of `mlx train` and `mlx data` for project folders: create, bind, show and run."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_runtime import __version__
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, Kind, main_class
from mlx_runtime.driver.arguments import Request, refuse_options
from mlx_runtime.errors import BindError, MlxError, RunStopped, UsageError, suggest
from mlx_runtime.importing import add_to_path
from mlx_runtime.settings import Settings, prepare_fork
from mlx_runtime.workers.placement import JOB_FLAG
from mlx_runtime.workers.stop_requests import DRIVER_SIGNALS, StopRequests, Terminated, sigterm_stops

if TYPE_CHECKING:
    from mlx_runtime.config.binding.conf_file import Binding

PACKAGED = Path(__file__).parents[2] / "template"
CHECKOUT = Path(__file__).parents[4]


def new(kind: Kind, name: str, output: Path, runtime: str = "", variant: str = "") -> Path:
    """Generate a project from the template in this package, offline. Return its folder.

    `runtime` is where its Makefile installs the runtime from; by default, it is where this package is from. `variant`
    is the folder of another template for the same kind of project.
    """
    from cookiecutter.exceptions import CookiecutterException
    from cookiecutter.main import cookiecutter

    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
        raise UsageError(
            f"{name!r} is not a valid {kind.title} name; use up to 100 letters, digits, - and _, starting with a letter"
        )
    folder = output / name
    if folder.exists():
        raise UsageError(f"{folder} already exists; choose another name, or another folder with -o")
    answers = {f"{kind.file.stem}_name": name, "_runtime": runtime or (requirement() if PACKAGED.is_dir() else "")}
    try:
        return Path(
            cookiecutter(str(template(kind, variant)), no_input=True, output_dir=str(output), extra_context=answers)
        )
    except (CookiecutterException, OSError) as error:
        raise MlxError(f"cannot create {folder}: {error}") from error


def template(kind: Kind, variant: str = "") -> Path:
    """Return the folder of the template of a kind of project, or of its variant, in this package or this checkout."""
    return (PACKAGED if PACKAGED.is_dir() else CHECKOUT) / (variant or kind.template)


def requirement() -> str:
    """Return the requirement, in Makefile syntax, with which pip installs this package again.

    A package from an index has no URL of its own: its requirement is the version, with a note for the user.
    """
    if url := _url():
        return f"mlx-runtime @ {url}".replace("$", "$$").replace("#", "\\#")
    found = f"mlx-runtime=={__version__}"
    cure = "if no package index has it, set RUNTIME in the Makefile to a wheel, a git URL or the folder of a checkout"
    print(f"note      make setup installs {found}; {cure}", file=sys.stderr)
    return found


def _url() -> str | None:
    """Return the URL of a wheel, folder or repository recorded by pip or uv (PEP 610), or None."""
    import importlib.metadata  # here, because it takes as long as importing click
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        recorded = importlib.metadata.distribution("mlx-runtime").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(recorded or "{}")
    url: str = origin.get("url", "")
    if url.startswith("file:") and not Path(url2pathname(urlsplit(url).path)).exists():
        return None
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{url}#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else url or None


def bind(kind: Kind, *, check: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` and its schema, and return lines to print.

    With `check`, write nothing, and raise BindError if the file is not up to date.
    """
    folder = kind.folder()
    existed = (folder / CONF).exists()
    bound = _bound_on_meta(kind, folder) or _bound(kind, folder)
    if check:
        if bound.stale:
            raise BindError("\n  ".join([f"{CONF} is not up to date; run: {kind.command} bind", *bound.lines()]))
        return [f"{CONF} is up to date"]
    bound.write()
    title = "wrote" if not existed else "updated" if bound.stale else "unchanged"
    return [f"{title} {CONF}", *bound.lines()]


def _bound(kind: Kind, folder: Path, device: str | None = None) -> "Binding":
    """Import the project and bind it, with tensors on `device` by default."""
    import torch

    from mlx_runtime.config.binding import conf_file

    with torch.device(device) if device else contextlib.nullcontext():
        return conf_file.bind(main_class(kind, folder), CONF)


def _bound_on_meta(kind: Kind, folder: Path) -> "Binding | None":
    """Bind in a forked process with default networks on the meta device, which takes no time or memory for any size.

    Some constructors need real numbers and fail there. The fork keeps their unfinished import out of this process.
    Return None if this failed or forking is not safe. Binding in this process then shows the error.
    """
    prepare_fork()
    import mlx_runtime.config.binding  # noqa: F401 - imports torch once for both processes
    from mlx_runtime.workers.fork_server import die_with_parent, unsafe_to_fork

    def begin() -> None:
        die_with_parent()
        for number in DRIVER_SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # this process reports them

    if unsafe_to_fork():
        return None
    context = multiprocessing.get_context("fork")
    with contextlib.suppress(Exception), ProcessPoolExecutor(1, context, initializer=begin) as pool:
        return pool.submit(_bound, kind, folder, "meta").result()
    return None


def bind_first(kind: Kind, folder: Path) -> None:
    """Bind if there is no conf.yaml yet."""
    if not (folder / CONF).exists():
        print(f"no {CONF} yet: binding first", flush=True)
        print("\n".join(bind(kind)), flush=True)


def show(keys: Sequence[str], overrides: Sequence[str], *, as_json: bool = False) -> str:
    """Return the config that a run would have, or its part below a key, and the source of each value.

    The checks are those of a run. The result has one line per value, or is `{"config": ..., "sources": {key: source}}`.
    """
    folder = AN_EXPERIMENT.folder()
    from mlx_runtime.config import composition
    from mlx_runtime.config.constructors.signatures import settings_of
    from mlx_runtime.config.interpolation import values_by_key

    experiment = main_class(AN_EXPERIMENT, folder)
    composed = composition.read(CONF, overrides, settings_of(experiment))
    found = values_by_key(composition.check(experiment, composed).tree)
    for key in keys:
        if key not in found:
            raise UsageError(f"there is no {key!r} in {CONF}.{suggest(key, found)}")
    selected = {key: value for key, value in found.items() if all(f"{key}.".startswith(f"{top}.") for top in keys)}
    leaves = {key: value for key, value in selected.items() if not isinstance(value, dict) or not value}
    sources = {key: composed.source(key) for key in leaves}
    if as_json:
        return json.dumps({"config": found[keys[0]] if keys else composed.tree, "sources": sources}, indent=2) + "\n"
    lines = {key: f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in leaves.items()}
    width = min(60, max(map(len, lines.values()), default=0))
    return "".join(f"{line:<{width}}  # {sources[key]}\n" for key, line in lines.items())


def settings(keys: Sequence[str]) -> Iterator[str]:
    """Yield lines about all settings in `cfg`, or only some keys: default, minimum and meaning."""
    folder = AN_EXPERIMENT.folder()
    from mlx_runtime.config.constructors.signatures import argument_texts, base_of, groups, settings_of
    from mlx_runtime.config.constructors.targets import object_at
    from mlx_runtime.loop.options import minimums

    experiment, least = main_class(AN_EXPERIMENT, folder), minimums()
    texts = argument_texts(base_of(experiment)) | argument_texts(groups(experiment)["cfg"])
    lines: dict[str, str] = {}  # of each setting, with its default
    for name, value in (dict.fromkeys(texts, ...) | settings_of(experiment)).items():
        inner = value if isinstance(value, dict) else {}
        section = argument_texts(object_at(inner.pop("_target_"))) if inner else {}
        texts |= {f"{name}.{item}": text for item, text in section.items()}
        lines[name] = f"cfg.{name}" if inner or value is ... else f"cfg.{name}={json.dumps(value, ensure_ascii=False)}"
        lines |= {f"{name}.{item}": f"cfg.{name}.{item}={json.dumps(default)}" for item, default in inner.items()}
    names = [key.removeprefix("cfg.") for key in keys]
    for name in names:
        if name not in lines:
            near = suggest(name, lines, "mlx train show --settings")
            raise UsageError(f"there is no setting {name!r}.{near}")
    for name, line in lines.items():
        if not names or any(f"{name}.".startswith(f"{wanted}.") for wanted in names):
            yield line + (f"  (at least {least[name]})" if name in least else "")
            yield from textwrap.wrap(texts.get(name, ""), 96, initial_indent="    ", subsequent_indent="    ")


def run(kind: Kind, request: Request) -> None:
    """Call `main` of the `main.py` in the working directory."""
    with stopped_early("before the run began") if kind == AN_EXPERIMENT else contextlib.nullcontext():
        folder, _ = load(kind, request.overrides, "run")  # explains import errors better than main.py would
        main = folder / "main.py"
        if not main.is_file():
            raise UsageError(f"{folder} has no main.py; copy it from a new {kind.title}: {kind.command} new NAME")
        add_to_path(folder)
        function = runpy.run_path(str(main), run_name="main").get("main")
        if not callable(function):
            raise UsageError(f"{main} has no function main(overrides); write one like that of a new {kind.title}")
        function(request)


@contextlib.contextmanager
def stopped_early(when: str) -> Iterator[None]:
    """End the block on SIGTERM and SIGHUP with a message, except while a run handles them."""
    control = StopRequests()
    try:
        with sigterm_stops(control):
            yield
    except Terminated:
        why = control.reason or "SIGTERM"
        raise RunStopped(f"stopped by {why} {when}", control.exit_code) from None


def load(kind: Kind, overrides: Sequence[str], verb: str) -> tuple[Path, type]:
    """Prepare to run the project in the working directory, and bind it if it has no conf.yaml.

    Return its folder and its class.
    """
    folder = kind.folder()
    refuse_options(overrides, f"{kind.command} {verb}")
    prepare_fork()
    if kind == AN_EXPERIMENT and not Settings.read().quiet:
        print(f"loading   {kind.file}", flush=True)
    bind_first(kind, folder)
    cls = main_class(kind, folder)
    if kind == AN_EXPERIMENT and JOB_FLAG not in os.environ:
        from mlx_runtime.workers.local import warm_up

        warm_up()
    return folder, cls
