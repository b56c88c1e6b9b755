"""A run started from Python, as the process that trains it: a fork of the warm server, without a terminal."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_runtime import companions
from mlx_runtime.companions.notebook.links import Link
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, project_module
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.planning import connect
from mlx_runtime.driver.request import RunConfig, load_config
from mlx_runtime.driver.terminal import fit
from mlx_runtime.errors import MlxError, RunStopped
from mlx_runtime.events import Event, RunEnded, RunStarted
from mlx_runtime.settings import prepare_fork
from mlx_runtime.workers.local import cool_down, warm_up
from mlx_runtime.workers.worker import ignore_breakpoints

NO_TERMINAL = "a run started from Python has no terminal; to debug, use mlx train run cfg.start_workers=0"


@dataclass(frozen=True)
class RunJob:
    """The run that a process trains."""

    module: str  # module of the experiment's class, like `src.experiment`
    name: str  # name of that class
    request: Request
    command: tuple[str, ...]  # command line of the requesting process, for the record
    function: str = ""  # import path of the training function, if `Trainer` requested the run

    @property
    def title(self) -> str:
        """Import path of the class or function that the user runs."""
        return self.function or f"{self.module}.{self.name}"

    def resume_call(self, place: str) -> str:
        """Return Python code that resumes the run at a path or URI."""
        name = self.title.rpartition(".")[2]
        return f'trainer.run({name}, resume="latest")' if self.function else f'run({name}, ["--resume={place}"])'


def work(job: RunJob, connection: Any) -> int:
    """Train a run in this process, which the server has just started, in the folder of the experiment."""
    prepare_fork()
    sys.orig_argv = list(job.command)
    warm_up()  # before anything starts threads
    link = Link(connection)
    ended: RunEnded | None = None
    place = ""

    def handle(event: Event) -> None:
        nonlocal ended, place
        ended = event if isinstance(event, RunEnded) else ended
        place = event.run.place if isinstance(event, RunStarted) else place
        link.emit(event)

    error: BaseException | None = None
    try:
        ignore_breakpoints(link.emit, NO_TERMINAL)
        experiment = getattr(project_module(job.module, Path.cwd()), job.name)
        config = load_bound_config(experiment, job.request, job.title)
        if job.function:  # report its errors before the run begins
            companions.part("notebook.functions").load_function(config.cfg)
        with connect(config.cfg) as cluster:
            fit(experiment, config, cluster, listeners=[handle], control=link.control)
    except BaseException as caught:
        error = caught
        if isinstance(caught, MlxError) and "--resume" in caught.hint and ended is not None:
            caught.hint = f"Resume from the last checkpoint: {job.resume_call(place)}"
    cool_down()  # an unused server would keep this process from exiting
    unbegun = RunEnded("STOPPED" if isinstance(error, KeyboardInterrupt | RunStopped) else "FAILED", {})
    link.finish(replace(ended or unbegun, error=error))
    return 0


def load_bound_config(experiment: type, request: Request, title: str) -> RunConfig:
    """Return the checked config of an experiment. If the project has no conf.yaml, write one first."""
    with conf_of(experiment) as conf:
        if not conf.is_file():
            bind(experiment, conf).write()
        return load_config(experiment, request, conf, title=None if conf is CONF else title)


@contextlib.contextmanager
def conf_of(experiment: type) -> Iterator[Path]:
    """Provide the conf.yaml of an experiment within the block.

    For `src.experiment`, it is the project's own file. For other modules, such as the cells of a notebook, it contains
    the defaults in their code.
    """
    if experiment.__module__ == AN_EXPERIMENT.module:
        yield CONF
        return
    with tempfile.TemporaryDirectory(prefix="mlx-conf-") as folder:
        conf = Path(folder, CONF.name)
        bind(experiment, conf).write()
        yield conf
