"""`mlx train`."""

from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import OPTIONS, Request
from mlx_runtime.runs.folder import names_run
from mlx_runtime.runs.queries import lookup


@click.group("train", cls=commands.Group)
def group() -> None:
    """Create, bind and run an experiment."""


group.add_command(commands.new_command(AN_EXPERIMENT))
group.add_command(commands.bind_command(AN_EXPERIMENT))


@group.command(context_settings=commands.OVERRIDES)
@options.json
@options.debug
@commands.variant_option
@click.option("--settings", is_flag=True, help="Explain the settings in cfg instead, or only KEY.")
@click.argument("arguments", nargs=-1, metavar="[KEY] [OVERRIDES]...")
def show(as_json: bool, settings: bool, variants: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Print the config that a run would have, and the file or override that each value comes from."""
    if settings:
        click.echo("\n".join(projects.settings(arguments)))
        return
    keys = [item for item in arguments[:1] if "=" not in item and not item.startswith(("~", "+", "-"))]
    request = Request.of(arguments[len(keys) :], variants=variants)
    click.echo(projects.show(keys, request.overrides, as_json=as_json), nl=False)


@group.command(context_settings=commands.OVERRIDES, params=[*OPTIONS])
@options.verbosity
def run(**typed: Any) -> None:
    """Train on this machine. OVERRIDES are Hydra's: cfg.num_epochs=3 optimizers.adam.lr=1e-4"""
    projects.run(AN_EXPERIMENT, Request.of(**typed))


@group.command("eval", context_settings=commands.OVERRIDES)
@options.verbosity
@click.option(
    "--checkpoint", "which", metavar="WHICH", type=options.word, help="Of RUN: latest (default), best or epoch_0004."
)
@commands.variant_option
@click.argument("arguments", nargs=-1, metavar="[RUN|PATH] [OVERRIDES]...")
def evaluate(which: str | None, variants: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Evaluate a checkpoint without training: run eval_loop, and store the results in the run's folder.

    RUN is run_003, 3 or latest (the default), or name/run_003. PATH is the folder or URI of a run or of a checkpoint.
    """
    named = [item for item in arguments[:1] if names_run(item)]
    folder, checkpoint = lookup.resolve_checkpoint(named[0] if named else "latest", which)
    request = Request.of(arguments[len(named) :], variants=variants, origin=folder.location, checkpoint=checkpoint)
    projects.run(AN_EXPERIMENT, request)
