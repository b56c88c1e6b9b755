"""Run the experiment or data job in the working directory."""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mlx_runtime.cli.exits import clean_exit
from mlx_runtime.cli.verbs.binding import bind
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, Kind, main_class
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.settings import Settings, prepare_fork
from mlx_runtime.training.engines.placement import JOB_FLAG
from mlx_runtime.training.engines.processes import unsafe_to_fork


def bind_first(kind: Kind, folder: Path) -> None:
    """Bind if there is no conf.yaml yet, in a process of its own: it may import what a run must not."""
    if (folder / CONF).exists():
        return
    prepare_fork()
    print(f"no {CONF} yet: binding first", flush=True)
    context: Any = cast(Any, multiprocessing.get_context("spawn" if unsafe_to_fork() else "fork"))
    process = context.Process(target=_bind_and_print, args=(kind,))
    process.start()
    process.join()
    if process.exitcode < 0:
        raise MlxError(f"binding was killed by signal {-process.exitcode}")
    if process.exitcode:
        sys.exit(process.exitcode)  # the reason is printed already


def _bind_and_print(kind: Kind) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process reports Ctrl-C
    with clean_exit():
        print("\n".join(bind(kind)), flush=True)


def run(kind: Kind, overrides: Sequence[str]) -> None:
    """Run the `main.py` of the working directory with these overrides.

    Raises:
        UsageError: the working directory is not an experiment or a data job.
    """
    folder = kind.folder()
    refuse_options(kind, overrides, "run")
    prepare_fork()
    if kind == AN_EXPERIMENT and not Settings.read().quiet:
        print(f"loading   {kind.file}", flush=True)
    bind_first(kind, folder)
    main_class(kind, folder)  # explains errors of the import better than main.py would
    if kind == AN_EXPERIMENT and JOB_FLAG not in os.environ:
        from mlx_runtime.training.engines import local

        local.warm_up()
    main = folder / "main.py"
    if not main.is_file():
        raise UsageError(f"{folder} has no main.py; copy it from a new {kind.title}: {kind.command} new NAME")
    sys.path.insert(0, str(folder))
    sys.argv = [str(main), *overrides]
    runpy.run_path(str(main), run_name="__main__")


def refuse_options(kind: Kind, overrides: Sequence[str], verb: str) -> None:
    """Refuse words that look like options but are not.

    Raises:
        UsageError: there is such a word; the message names the first.
    """
    known: tuple[str, ...] = ("--resume", "--from=") if kind == AN_EXPERIMENT else ()
    if kind == AN_EXPERIMENT and verb == "run":
        known += ("--fast-dev-run", "--eval=")
    options = [item for item in overrides if item.startswith("-") and not item.startswith(known)]
    if options:
        raise UsageError(f"there is no option {options[0]}; see: {kind.command} {verb} --help")
