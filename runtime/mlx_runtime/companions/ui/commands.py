"""Commands of the page, and the one that draws an experiment."""

from pathlib import Path

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import Request, refuse_options
from mlx_runtime.errors import UsageError

DRAW_S = 600.0
"""Time limit for building the models, with the beginning of the loop."""


@click.command("draw", context_settings=commands.OVERRIDES)
@options.debug
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=options.PAGE,
    default="model.md",
    show_default=True,
    help="A .md or .svg.",
)
@click.option(
    "--depth", metavar="N", type=click.IntRange(min=0), default=2, show_default=True, help="Levels of modules."
)
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_draw(output: Path, depth: int, variants: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Draw the experiment: the modules of its models with shapes and sizes, and its wiring.

    A .md file has a mermaid diagram and a table. worker_loop runs until it has called the models; nothing is trained.
    """
    from mlx_runtime.companions.ui import drawing

    words = Request.of(overrides, variants=variants).overrides
    refuse_options(words, "mlx train draw")
    write = {".md": drawing.to_markdown, ".svg": drawing.to_svg}.get(output.suffix)
    if write is None:
        raise UsageError(f"{output} is neither a .md nor a .svg file; write: mlx train draw -o model.md")
    folder = AN_EXPERIMENT.folder()
    projects.bind_first(AN_EXPERIMENT, folder)
    structure = drawing.structure_of(folder, words, DRAW_S)
    output.write_text(write(structure, depth), encoding="utf-8")
    options.say(f"wrote {output}")
