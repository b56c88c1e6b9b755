"""The script that a user starts: workers import it as a module, up to the call that starts the run.

Errors that end it are printed without the frames of the runtime.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from mlx_runtime.companions.notebook import sources
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.errors import ConfigError, MlxError, RunStopped, UsageError, printable, raised_in, short_message
from mlx_runtime.settings import Settings

_importing = False


class ImportEnded(BaseException):
    """Ends the import of a script where it would start a run again; what the run needs is defined above."""


def end_import() -> None:
    """Raise `ImportEnded` if a worker is importing a script, which has reached a call that starts a run."""
    if _importing:
        raise ImportEnded


def show_own_frames() -> None:
    """From now on, print errors that end this process with the user's frames only; see `_print_own_frames`.

    Does nothing if the user has set a hook for errors. Ray sets one when it is imported, which prints as Python does.
    """
    if sys.excepthook.__module__.partition(".")[0] in ("sys", "ray"):
        sys.excepthook = partial(_print_own_frames, sys.excepthook)


def _print_own_frames(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error of a run, or one of the user's own code that the runtime has called, without the runtime's frames.

    Other errors, and all with MLX_DEBUG=1, are left to the hook that was set before.
    """
    shown, runtime = traceback.TracebackException(kind, error, trace), Path(__file__).parents[2]
    ours = [Path(frame.filename).is_relative_to(runtime) for frame in shown.stack]
    interrupted = isinstance(error, KeyboardInterrupt) and any(ours)  # while this process waited for a run
    if Settings.read().debug or not (isinstance(error, MlxError) or interrupted or raised_in(error, Path.cwd())):
        before(kind, error, trace)
        return
    count = ours.index(True) if interrupted else len(ours)
    own = [frame for frame, is_ours in zip(shown.stack[:count], ours, strict=False) if not is_ours]
    shown.stack = traceback.StackSummary.from_list(own)
    if isinstance(error, MlxError):
        shown.__cause__ = shown.__context__ = None  # its message is complete
    print(printable("".join(shown.format())), end="", file=sys.stderr)
    if interrupted:
        raise SystemExit(RunStopped.exit_code)


def name_script(name: str) -> str | None:
    """Return the module name by which workers import the script of this process; None if there is no script.

    From now on, the script is that module in this process, too, so that objects of its classes can be unpickled.

    Args:
        name: what workers import from it, for the error.

    Raises:
        UsageError: workers cannot import it, because of its name or folder.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None:
        return None
    file = Path(str(main.__file__)).resolve()
    if not file.is_relative_to(Path.cwd()):
        raise UsageError(f"workers cannot import {name} from {file}; start the script in its folder: cd {file.parent}")
    module = ".".join(file.relative_to(Path.cwd()).with_suffix("").parts)
    if sys.modules.get(module) is main:
        return module
    if not all(map(str.isidentifier, module.split("."))):
        raise UsageError(f"workers cannot import {name} from {file.name}, which is not the name of a module; rename it")
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    finally:
        sys.path.pop(0)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        raise UsageError(
            f"workers cannot import {name} from {file.name}, because another module has its name; rename it"
        )
    sys.modules[module] = main
    return module


def load(path: str, source: str = "", secrets: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Import a training function. The import of its module ends where it starts a run.

    Args:
        path: import path of the function.
        source: source of its module, if it has no file.
        secrets: variables of that module that hold secrets, by name.

    Raises:
        ConfigError: it is not there.
    """
    try:
        if source:
            sources.execute(source, secrets)
        return _load(path)
    except (ImportError, AttributeError, NameError) as error:
        raise ConfigError(f"cfg.function is {path!r}, which cannot be imported: {short_message(error)}") from None


def _load(path: str) -> Any:
    global _importing
    module = path.rpartition(".")[0]
    spec = importlib.util.find_spec(module) if module not in sys.modules else None
    if spec is None or spec.loader is None:
        return object_at(path)
    sys.modules[module] = made = importlib.util.module_from_spec(spec)
    _importing = True
    try:
        spec.loader.exec_module(made)
    except ImportEnded:
        if path.rpartition(".")[2] not in vars(made):
            cure = 'define it above, or start runs below if __name__ == "__main__"'
            raise ImportError(f"{module} defines it below the first call that starts a run; {cure}") from None
    except BaseException:
        del sys.modules[module]
        raise
    finally:
        _importing = False
    return object_at(path)
