"""Commands that answer with trained models."""

from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import FOLDER, say, word
from mlx_runtime.runs import queries

FORMATS = ("pt2", "safetensors", "onnx", "aoti")


def formats(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Convert `pt2,onnx`, which may be repeated."""
    names = [name.strip() for value in values for name in value.split(",")]
    if unknown := [name for name in names if name not in FORMATS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(FORMATS)}")
    return names


@click.command("export")
@options.name()
@options.run("latest")
@click.option("-o", "--output", type=FOLDER, help="Default: a folder in this one, named after the checkpoint.")
@click.option("--checkpoint", metavar="WHICH", type=word, help="best, latest or epoch_0004. Default: best, or latest.")
@click.option(
    "--format",
    "chosen",
    multiple=True,
    default=("pt2",),
    show_default=True,
    callback=formats,
    metavar="pt2|safetensors|onnx|aoti",
    help="Repeat it, or separate names by commas. The weights are always written as safetensors.",
)
@click.option("--code", type=click.Choice(["stored"]), help="Use the code that the run stored.")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
def xp_export(
    name: str, run: str, output: str | None, checkpoint: str | None, chosen: list[str], code: str | None, force: bool
) -> None:
    """Write a RUN (run_003, 3 or latest) of NAME to a folder that needs nothing of this project, and prove it.

    The outputs of the exported program are compared with those of `predict`, in a process without this package.
    """
    from mlx_runtime.companions.serving.export import export

    folder = None if output is None else Path(output)
    run_folder = queries.resolve_run(name, run)
    say(export(run_folder, folder, checkpoint, chosen, trust=code == "stored", force=force))
