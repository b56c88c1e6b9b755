"""Commands for mirrors."""

from functools import partial

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word
from mlx_runtime.companions import is_remote
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs.queries import lookup


@click.command("push")
@options.name(required=False)
@options.run()
@click.option("--to", metavar="URI", type=word, help="Like hf://user/name. Default: the mirror of the run.")
def xp_push(name: str | None, run: str | None, to: str | None) -> None:
    """Complete the mirror of a RUN (run_003, 3 or latest) of NAME; by default, all unfinished mirrors."""
    from mlx_runtime.companions.hub import pushing

    announce = partial(say, err=True)
    if run is not None and is_remote(run):
        raise UsageError(f"{run} is no run; write: mlx xp push {name} --to {run}")
    if name is None:
        folders = pushing.unfinished_runs(lookup.storage_root())
        if to is not None:
            raise UsageError("which run? mlx xp push NAME RUN --to URI")
        if not folders:
            say("all mirrors are complete", err=True)
    else:
        folders = [lookup.resolve_run(name, run or "latest")]
    failed: list[MlxError] = []
    for folder in folders:
        try:
            say(pushing.push(folder, to, announce))
        except MlxError as error:  # continue with the others
            if len(folders) == 1:
                raise
            failed.append(error)
            say(f"error: {error}", err=True)
    if failed:
        raise MlxError(f"{len(failed)} of {len(folders)} runs were not uploaded; see above")
