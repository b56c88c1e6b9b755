"""The options of `mlx train launch --slurm`."""

from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import Function

OPTIONS = ("partition", "account", "time", "gres", "output")
"""Options of sbatch that have the same name here. Without them, sbatch reads SBATCH_PARTITION and the like."""


def _with_sbatch_options(function: Function) -> Function:
    for name in OPTIONS:
        function = click.option(f"--{name}", metavar=name.upper(), type=options.word)(function)
    return function


@click.command("slurm", context_settings=commands.OVERRIDES, add_help_option=False)
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), default=1)
@_with_sbatch_options
@click.option("--sbatch", "words", metavar="OPTIONS", multiple=True, type=options.word)
@click.option("--dry-run", is_flag=True)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def launch_options(**_: Any) -> None:
    """Parse the options for Slurm. The remaining words are those of `launch`."""
