"""A command: `mlx rows NAME/RUN` prints the metrics of a run as CSV.

An entry point in the group `mlx_runtime.commands` makes it a command of `mlx`; see `pyproject.toml`.
"""

import click

import mlx_runtime


@click.command("rows", help="Print the metrics of RUN, like digits/run_001, as CSV.")
@click.argument("run")
def rows(run):
    click.echo(mlx_runtime.open_run(run).metrics().to_csv(index=False), nl=False)
