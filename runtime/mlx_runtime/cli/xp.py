"""`mlx xp`."""

import click

from mlx_runtime import xp
from mlx_runtime.errors import clean_exit


@click.group("xp")
def group() -> None:
    """Look at runs, and end them."""


@group.command()
@click.argument("name")
@click.argument("run")
def stop(name: str, run: str) -> None:
    """Save a checkpoint of a RUN (run_003, 3 or latest) of NAME at its next step, and end it."""
    with clean_exit():
        click.echo(xp.stop(name, run))


@group.command()
@click.argument("name", required=False)
@click.argument("run", required=False)
@click.option("--port", default=6006, show_default=True, help="Port of the page, on this machine only.")
def board(name: str | None, run: str | None, port: int) -> None:
    """Open TensorBoard on everything, an experiment or a folder NAME, or its RUN (run_003, 3 or latest)."""
    with clean_exit():
        xp.board(name, run, port)
