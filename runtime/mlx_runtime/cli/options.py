"""Options and arguments shared by several commands, and their output."""

import functools
import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from mlx_runtime import companions
from mlx_runtime.errors import MlxError, UsageError, printable
from mlx_runtime.settings import Settings, be_quiet, be_verbose

Function = TypeVar("Function", bound=Callable[..., None])


def _apply(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Apply `--quiet`, `--verbose` or `--debug` to this process and its children."""
    if given and option.name == "debug":
        os.environ["MLX_DEBUG"] = "1"
    elif given:
        if context.meta.setdefault("verbosity", option.name) != option.name:
            raise UsageError("--quiet and --verbose contradict each other; pass one of them")
        be_quiet() if option.name == "quiet" else be_verbose()


_applied = functools.partial(click.option, is_flag=True, expose_value=False, callback=_apply)

ADDRESS_HELP = "Dashboard of the cluster, like http://head:8265. Default: RAY_ADDRESS."


class _Path(click.Path):
    """A path; rejects an empty one, such as from an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if Settings.read().on:  # the file will be sent to another machine
            if Path(value).is_absolute() or ".." in Path(value).parts:
                raise click.BadParameter(f"{value} is not below the working directory, to which a cluster sends files")
            Path(value).parent.mkdir(parents=True, exist_ok=True)
        return super().convert(word(value) if isinstance(value, str) else value, param, context)


FOLDER = _Path(file_okay=False)
PAGE = _Path(dir_okay=False, path_type=Path)

address = click.option("--ray-address", "--address", "ray_address", metavar="URL", help=ADDRESS_HELP)
debug = _applied("--debug", help="Show tracebacks.")
json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
output = click.option("-o", "--output", type=FOLDER, default=".", help="Folder to create it in.")
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def verbosity(function: Function) -> Function:
    """Add `--quiet`, `--verbose` and `--debug`."""
    function = _applied("-v", "--verbose", help="Show the output of Ray.")(function)
    function = _applied("-q", "--quiet", help="Print only results and errors.")(function)
    return debug(function)


def say(text: object, *, err: bool = False) -> None:
    """Print a line that may contain text from the storage, written by others, without control characters."""
    click.echo(printable(str(text), one_line=True), err=err)


def confirm(question: str, otherwise: str = "nothing was removed") -> None:
    """Ask a question, which may contain names from the storage.

    Raises MlxError, which begins with `otherwise`, unless the answer is yes.
    """
    if Settings.read().on:  # the terminal is on another machine
        companions.part("ray.frames").confirm(question)
        return
    try:
        agreed = click.confirm(printable(question, one_line=True))
    except click.Abort:  # Ctrl-C, or there is no terminal
        click.echo()
        agreed = False
    if not agreed:
        raise MlxError(f"{otherwise}; add -y to skip this question")


def job_statuses(jobs: set[tuple[str, str]]) -> Mapping[tuple[str, str], str]:
    """Return the status of jobs by address and id, asking their clusters, whose clients are imported only here."""
    by_client: dict[str, set[tuple[str, str]]] = {}
    for address, job in jobs:
        kind = companions.jobs_at(address)
        if kind is not None:
            by_client.setdefault(kind.client, set()).add((address, job))
    found: dict[tuple[str, str], str] = {}
    for client, own in by_client.items():
        found |= companions.part(client).job_statuses(own)
    return found


def word(text: str) -> str:
    """Return a word of an option or argument. Rejects empty text and control characters."""
    if not text.strip():
        raise click.BadParameter("it is empty; perhaps a shell variable is not set")
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise click.BadParameter(f"{text!a} contains a control character")
    return text


def duration_s(text: str) -> float:
    """Convert `90s`, `90m`, `1.5h` or `2d` to seconds, as the type of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration; write 90m, 2h or 1d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def name(*, required: bool = True) -> Callable[[Function], Function]:
    """Add the argument NAME, an experiment in the storage."""
    return click.argument("name", type=word, required=required)


def run(default: str | None = None) -> Callable[[Function], Function]:
    """Add the argument RUN of an experiment."""
    return click.argument("run", type=word, default=default, required=False)
