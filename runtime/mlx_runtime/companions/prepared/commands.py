"""The command that prepares datasets."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from mlx_runtime import companions
from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.companions.prepared.datasets import prepare_datasets
from mlx_runtime.config.projects import AN_EXPERIMENT, main_class
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.tracking.console import Display
from mlx_runtime.training.planning import check_datasets
from mlx_runtime.training.request import RunConfig, load_config


@click.command("prepare", context_settings=commands.OVERRIDES)
@options.verbosity
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_prepare(variants: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Map every dataset through ray_map_batches once and store it for later runs."""
    _prepare([*overrides, *commands.variant_words(variants)])


def _prepare(overrides: Sequence[str]) -> None:
    folder = AN_EXPERIMENT.folder()
    projects.refuse_options(AN_EXPERIMENT, overrides, "prepare")
    projects.bind_first(AN_EXPERIMENT, folder)
    prepare(load_config(main_class(AN_EXPERIMENT, folder), [*overrides, "cfg.preparation.mode=make"]))


def prepare(config: RunConfig) -> None:
    """Prepare every dataset of an experiment that can be prepared and is not yet.

    Raises:
        DatasetError: a dataset cannot be batched or prepared.
        StorageError: the store cannot be written.
    """
    check_datasets(config)
    display = Display(sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        if stream_names(config.tree):
            stack.enter_context(companions.part("ray.start").start_ray(config.cfg))
        sets = prepare_datasets(config, Path.cwd(), display.handle)
    if sets:
        display.print(f"{len(sets)} prepared in {config.prepared_root}; runs use them automatically")
    else:
        display.print("nothing was prepared")
