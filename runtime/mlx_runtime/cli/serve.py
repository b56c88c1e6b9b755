"""`mlx serve`, whose commands are those of companions."""

import click

from mlx_runtime.cli import commands


@click.group("serve", cls=commands.Group)
def group() -> None:
    """Answer requests with trained models."""
