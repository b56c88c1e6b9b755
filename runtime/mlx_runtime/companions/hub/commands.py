"""Commands for mirrors."""

import click

from mlx_runtime import companions
from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs import lookup
from mlx_runtime.runs.folder import SWEEP, RunFolder
from mlx_runtime.runs.remote import is_remote


@click.command("push")
@options.name(required=False)
@options.run()
@click.option("--to", metavar="URI", type=word, help="Like hf://user/name. Default: where the run was mirrored to.")
def xp_push(name: str | None, run: str | None, to: str | None) -> None:
    """Upload a RUN (run_003, 3 or latest) of NAME to its mirror, completely; by default, all unfinished ones.

    Of a sweep (sweep_001), the best run is uploaded, with a table of the trials. In place of RUN, there may be a
    repository, as with --to: mlx xp push digits/sweep_001 hf://user/name
    """
    from mlx_runtime.companions.hub import pushing

    def mirror(folder: RunFolder) -> str:
        def announce(text: str) -> None:
            say(text, err=True)

        if folder.name.startswith(SWEEP):
            url: str = companions.part("sweeps.report").push(folder, to, announce)
            return url
        return pushing.push(folder, to, announce)

    if name is None:
        folders = pushing.unfinished(lookup.storage_root())
        if to is not None:
            raise UsageError("which run? mlx xp push NAME RUN --to URI")
        if not folders:
            say("all mirrors are complete", err=True)
    elif run is not None and is_remote(run):
        folders, to = [lookup.resolve_run(name)], run
    else:
        folders = [lookup.resolve_run(name, run or "latest")]
    failed: list[MlxError] = []
    for folder in folders:
        try:
            say(mirror(folder))
        except MlxError as error:  # the others may be complete nevertheless
            if len(folders) == 1:
                raise
            failed.append(error)
            say(f"error: {error}", err=True)
    if failed:
        raise MlxError(f"{len(failed)} of {len(folders)} runs were not uploaded; see above")


@click.command("release")
@click.argument("repository", type=word)
def xp_release(repository: str) -> None:
    """Let another machine continue the run in REPOSITORY, like hf://user/name, whose machine is gone."""
    from mlx_runtime.companions.hub import claims
    from mlx_runtime.companions.hub.repository import Address, Repository

    say(claims.release(Repository(Address.parse(repository))))
