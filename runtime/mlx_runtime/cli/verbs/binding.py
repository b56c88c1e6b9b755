"""Write or check the conf.yaml of a project folder."""

import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_runtime.config.projects import CONF, Kind, main_class
from mlx_runtime.errors import BindError
from mlx_runtime.settings import prepare_fork
from mlx_runtime.training.engines.processes import unsafe_to_fork

if TYPE_CHECKING:
    from mlx_runtime.config.binding import Binding


def bind(kind: Kind, *, check: bool = False, diff: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` in the working directory, and its schema.

    Args:
        kind: kind of project.
        check: write nothing, and refuse a file that is not up to date.
        diff: write nothing, and return what would change.

    Returns:
        Lines for the user: what was written, then each change.

    Raises:
        UsageError: the working directory is not a project of this kind.
        BindError: conf.yaml cannot describe a constructor; with `check`, the file is not up to date.
    """
    folder = kind.folder()
    existed = (folder / CONF).exists()
    bound = _bound_on_meta(kind, folder) or _bound(kind, folder)
    if diff:
        return bound.diff().splitlines()
    if check:
        if bound.stale:
            raise BindError("\n  ".join([f"{CONF} is not up to date; run: {kind.command} bind", *bound.lines()]))
        return [f"{CONF} is up to date"]
    bound.write()
    title = "wrote" if not existed else "updated" if bound.stale else "unchanged"
    return [f"{title} {CONF}", *bound.lines()]


def _bound(kind: Kind, folder: Path, device: str | None = None) -> "Binding":
    """Import the project and bind it, with its default tensors on a device."""
    import torch

    from mlx_runtime.config import binding

    with torch.device(device) if device else contextlib.nullcontext():
        return binding.bind(main_class(kind, folder), CONF)


def _bound_on_meta(kind: Kind, folder: Path) -> "Binding | None":
    """Bind in a forked process with default networks on the meta device, where any size takes no time and no memory.

    Some constructors need real numbers and fail there. The fork keeps their half-finished import out of this process.

    Returns:
        None if anything failed, or if forking is not safe. Binding in this process then shows what is really wrong.
    """
    prepare_fork()
    import mlx_runtime.config.binding  # noqa: F401 - imports torch once for both processes

    if unsafe_to_fork():
        return None
    with contextlib.suppress(Exception), ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_bound, kind, folder, "meta").result()
    return None
