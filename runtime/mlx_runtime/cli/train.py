"""`mlx train`."""

import os
from pathlib import Path

import click

from mlx_runtime import train
from mlx_runtime.errors import clean_exit
from mlx_runtime.settings import Settings, be_verbose


@click.group("train")
def group() -> None:
    """Make, bind and run an experiment."""


@group.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to make it in.")
def new(name: str, output: str) -> None:
    """Make a new experiment in the folder NAME."""
    with clean_exit(debug=Settings.read().debug):
        folder = train.new(name, Path(output))
    click.echo(f"made {folder}; next: cd {folder} && make run")


@group.command()
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def bind(debug: bool) -> None:
    """Write or update src/conf.yaml from the constructors' defaults. Your edits stay."""
    with clean_exit(debug=debug or Settings.read().debug):
        for line in train.bind():
            click.echo(line)


@group.command(context_settings={"ignore_unknown_options": True})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--verbose", is_flag=True, help="Show what Ray prints.")
@click.argument("overrides", nargs=-1)
def run(debug: bool, verbose: bool, overrides: tuple[str, ...]) -> None:
    """Train here. OVERRIDES are Hydra's: cfg.num_epochs=3 optimizers.adam.lr=1e-4"""
    if debug:
        os.environ["MLX_DEBUG"] = "1"
    if verbose:
        be_verbose()
    with clean_exit(debug=Settings.read().debug):
        train.run(overrides)
