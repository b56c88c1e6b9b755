"""Generate an experiment or a data job from its template."""

import re
from pathlib import Path

from mlx_runtime import __version__
from mlx_runtime.config.projects import Kind
from mlx_runtime.errors import (
    MlxError,
    UsageError,
)

PACKAGED = Path(__file__).parents[2] / "template"
CHECKOUT = Path(__file__).parents[4]


def new(kind: Kind, name: str, output: Path) -> Path:
    """Generate a project from the template in this package, without a network.

    Returns:
        The new folder.

    Raises:
        UsageError: the name is not valid, or the folder exists.
    """
    from cookiecutter.exceptions import CookiecutterException
    from cookiecutter.main import cookiecutter

    check_name(kind, name)
    folder = output / name
    if folder.exists():
        raise UsageError(f"{folder} already exists; choose another name, or another folder with -o")
    packaged = PACKAGED.is_dir()
    source = str((PACKAGED if packaged else CHECKOUT) / kind.template)
    answers = {kind.question: name} | ({"_runtime": f"mlx-runtime=={__version__}"} if packaged else {})
    try:
        made = cookiecutter(source, no_input=True, output_dir=str(output), extra_context=answers)
    except (CookiecutterException, OSError) as error:
        raise MlxError(f"cannot create {folder}: {error}") from error
    return Path(made)


def check_name(kind: Kind, name: str) -> None:
    """Refuse invalid names.

    Raises:
        UsageError: not letters, digits, `-` and `_` starting with a letter.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise UsageError(
            f"{name!r} is not a valid {kind.title} name; use letters, digits, - and _, starting with a letter"
        )
