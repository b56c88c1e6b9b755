"""The command that prepares datasets."""

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, main_class
from mlx_runtime.driver.arguments import Request, refuse_options


@click.command("prepare", context_settings=commands.OVERRIDES)
@options.verbosity
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_prepare(variants: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Map every dataset through ray_map_batches once and store it for later runs."""
    overrides = Request.of(overrides, variants=variants).overrides
    folder = AN_EXPERIMENT.folder()
    refuse_options(overrides, "mlx train prepare")
    projects.bind_first(AN_EXPERIMENT, folder)
    experiment = main_class(AN_EXPERIMENT, folder)
    from mlx_runtime.companions.prepared.datasets import prepare
    from mlx_runtime.driver.request import load_config

    prepare(load_config(experiment, [*overrides, "cfg.preparation.mode=make"]))
