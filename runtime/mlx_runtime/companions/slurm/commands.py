"""The options of `mlx train launch --slurm`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import Function

if TYPE_CHECKING:
    from mlx_runtime.companions.slurm.launch import SlurmLaunch

OPTIONS = ("partition", "account", "time", "gres", "output")
"""Options of sbatch that have the same name here. Without them, sbatch reads SBATCH_PARTITION and the like."""


def _with_sbatch_options(function: Function) -> Function:
    for name in reversed(OPTIONS):
        help = f"The option --{name} of sbatch."
        function = click.option(f"--{name}", metavar=name.upper(), type=options.word, help=help)(function)
    return function


@click.command("mlx train launch --slurm", context_settings=commands.OVERRIDES)
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), default=1, help="Number of nodes.")
@_with_sbatch_options
@click.option("--sbatch", "words", metavar="OPTIONS", multiple=True, type=options.word, help="More options of sbatch.")
@click.option("--dry-run", is_flag=True, help="Print the script instead of submitting it.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def launch_slurm(**_: Any) -> None:
    """Train on Slurm, as a batch job.

    Other options are those of mlx train launch and, with --sweep, mlx train sweep.
    """


def parse(words: Sequence[str]) -> "tuple[tuple[str, ...], Callable[..., SlurmLaunch]]":
    """Return the words that are no options here, and the function that prepares the launch."""
    given: dict[str, Any] = launch_slurm.make_context("launch --slurm", [*words]).params
    rest: tuple[str, ...] = given.pop("overrides")

    def prepare(folder: Path, load: Callable[[], Any], *, trials: int | None, show_all: bool) -> "SlurmLaunch":
        from mlx_runtime.companions.slurm.launch import prepare

        return prepare(folder, load, show_all=show_all, sweep=trials is not None, **given)

    return rest, prepare
