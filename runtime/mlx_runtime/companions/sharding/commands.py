"""Commands for checkpoints."""

from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import PAGE, say, word
from mlx_runtime.runs.queries import lookup


@click.command("consolidate")
@options.name()
@options.run("latest")
@click.option(
    "--checkpoint", metavar="WHICH", type=word, default="latest", show_default=True, help="Also best, or epoch_0004."
)
@click.option("-o", "--output", type=PAGE, help="Default: a file in this folder, named after the checkpoint.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def xp_consolidate(name: str, run: str, checkpoint: str, output: Path | None, force: bool) -> None:
    """Write the weights of a RUN (run_003, 3 or latest) of NAME to one safetensors file, sharded or not."""
    from mlx_runtime.companions.sharding import consolidation

    say(consolidation.consolidate(lookup.resolve_run(name, run), checkpoint, output, force=force))
