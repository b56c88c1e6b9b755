"""Options and arguments that several commands share, and how commands print and exit."""

import contextlib
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlx_runtime.cli.exits import clean_exit
from mlx_runtime.errors import UsageError, printable
from mlx_runtime.runs import lookup
from mlx_runtime.settings import be_quiet, be_verbose

Function = TypeVar("Function", bound=Callable[..., None])

address_option: Callable[[Function], Function] = click.option(
    "--ray-address",
    "--address",
    "ray_address",
    metavar="URL",
    help="Dashboard of the cluster, like http://head:8265. Default: RAY_ADDRESS.",
)

debug_option: Callable[[Function], Function] = click.option("--debug", is_flag=True, help="Show tracebacks.")

json_option: Callable[[Function], Function] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

yes_option: Callable[[Function], Function] = click.option("-y", "--yes", is_flag=True, help="Do not ask.")

output_option: Callable[[Function], Function] = click.option(
    "-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to create it in."
)


def verbosity_options(function: Function) -> Function:
    """Add `--quiet`, `--verbose` and `--debug`."""
    function = click.option("-v", "--verbose", is_flag=True, help="Show the output of Ray.")(function)
    function = click.option("-q", "--quiet", is_flag=True, help="Print only results and errors.")(function)
    return debug_option(function)


@contextlib.contextmanager
def command(*, quiet: bool = False, verbose: bool = False, debug: bool = False) -> Iterator[None]:
    """Run the body of a command with these options, and exit with one clear message if it raises."""
    if debug:
        os.environ["MLX_DEBUG"] = "1"
    with clean_exit():
        if quiet and verbose:
            raise UsageError("--quiet and --verbose contradict each other; pass one of them")
        if quiet:
            be_quiet()
        if verbose:
            be_verbose()
        yield


def say(text: object, *, err: bool = False) -> None:
    """Print a line with names or numbers from the storage, which others may have written."""
    click.echo(printable(str(text), one_line=True), err=err)


def confirm(question: str) -> None:
    """Ask a question that may contain such text, and exit unless the answer is yes."""
    click.confirm(printable(question, one_line=True), abort=True)


def job_statuses(jobs: set[tuple[str, str]]) -> Mapping[tuple[str, str], str]:
    """Ask clusters for the status of jobs, by address and id."""
    from mlx_runtime.cluster import dashboard

    return dashboard.job_statuses(jobs)


class Word(click.ParamType[Any]):
    """Text without control characters."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and any(unicodedata.category(letter) == "Cc" for letter in value):
            self.fail(f"{value!a} contains a control character", param, ctx)
        return value


WORD = Word()


def _complete_experiment(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    with contextlib.suppress(Exception):  # a shell cannot show errors
        from mlx_runtime.runs import folder

        names = sorted({run.experiment for run in folder.list_runs(lookup.storage_root())})
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return []


def _complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    with contextlib.suppress(Exception):
        from mlx_runtime.runs import folder

        names = [run.name for run in folder.list_runs(lookup.storage_root(), context.params["name"])]
        return [CompletionItem(name) for name in ["latest", *reversed(names)] if name.startswith(incomplete)]
    return []


def name_argument(*, required: bool = True) -> Callable[[Function], Function]:
    """Add the argument NAME, an experiment in the storage, with shell completion."""
    return click.argument("name", type=WORD, required=required, shell_complete=_complete_experiment)


def run_argument(default: str | None = None) -> Callable[[Function], Function]:
    """Add the argument RUN of an experiment, with shell completion."""
    return click.argument("run", type=WORD, default=default, required=False, shell_complete=_complete_run)
