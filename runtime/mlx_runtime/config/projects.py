"""Project folders: experiments and data jobs, each with its code and its conf.yaml in `src/`."""

import importlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mlx_runtime.errors import USER_ERRORS, MlxError, UsageError, raised_in, short_message
from mlx_runtime.importing import add_to_path, many_imports

CONF = Path("src/conf.yaml")
"""The config, relative to the project folder."""

SCHEMA = "conf.schema.json"
"""Name of its schema, in the same folder."""

EXPERIMENT = Path("src/experiment.py")
"""The file that makes a folder an experiment."""


@dataclass(frozen=True)
class Kind:
    """A kind of project: its name in messages and commands, the file by which it is recognized, and the class in it.

    `template` is the folder of its template in the repository, and `variants` are those of others.
    """

    title: str
    article: str
    command: str
    file: Path
    main: str
    base: str
    template: str
    variants: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The name of the module in that file."""
        return ".".join(self.file.with_suffix("").parts)

    def folder(self) -> Path:
        """Return the working directory; raise an error if it is not such a project."""
        folder = Path.cwd()
        if not (folder / self.file).is_file():
            raise UsageError(
                f"{folder} is not {self.article} {self.title}: it has no {self.file}. "
                f"Change into one, or make one with: {self.command} new NAME"
            )
        return folder


AN_EXPERIMENT = Kind("experiment", "an", "mlx train", EXPERIMENT, "Experiment", "BaseModule", ".", ("jax",))
DATA_JOB = Kind("data job", "a", "mlx data", Path("src/job.py"), "Job", "DataJob", "data_job")


def main_class(kind: Kind, folder: Path) -> type:
    """Import `src.experiment.Experiment` or `src.job.Job` of a folder."""
    module = project_module(kind.module, folder)
    cls = getattr(module, kind.main, None)
    if not isinstance(cls, type):
        raise UsageError(f"{kind.file} has no class {kind.main}; write: class {kind.main}({kind.base})")
    return cls


def project_module(name: str, folder: Path) -> ModuleType:
    """Import a module of a project, like `src.experiment`. Errors name the line that raised them."""
    add_to_path(folder)
    try:
        with many_imports():
            return importlib.import_module(name)
    except USER_ERRORS as error:
        if isinstance(error, MlxError) and not raised_in(error, folder):
            raise
        from mlx_runtime.extras import cure

        files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        why = short_message(error)
        if isinstance(error, SyntaxError) and Path(error.filename or "").parent == folder / "src":  # in no frame
            files.append((Path(str(error.filename)), error.lineno))
            why = error.msg
        lines = [f"src/{file.name}:{line}" for file, line in files if file.parent == folder / "src"]
        at = lines[-1] if lines else f"{name.replace('.', '/')}.py"
        message = f"{at}: {name} cannot be imported: {type(error).__name__}: {why}"
        raise MlxError("; ".join(filter(None, [message, cure(error)]))) from error


def commands(conf: Path = CONF) -> str:
    """Return the group of commands for a conf.yaml: `mlx data` in a data job, otherwise `mlx train`."""
    is_job = (conf.parent / DATA_JOB.file.name).is_file() and not (conf.parent / EXPERIMENT.name).is_file()
    return DATA_JOB.command if is_job else AN_EXPERIMENT.command
