"""`mlx data`."""

import json
import os
import sys
from pathlib import Path

import click

from mlx_runtime import data
from mlx_runtime.cli.words import WORD, address_option, agree, say
from mlx_runtime.cluster import JOB_FLAG
from mlx_runtime.errors import StorageError, UsageError, clean_exit
from mlx_runtime.settings import be_verbose
from mlx_runtime.storage import size_text


@click.group("data")
def group() -> None:
    """Fill the storage, look at it, and clean it up."""


@group.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to make it in.")
def new(name: str, output: str) -> None:
    """Make a new data job in the folder NAME."""
    with clean_exit():
        folder = data.new(name, Path(output))
    click.echo(f"made {folder}; next: cd {folder} && make run")


@group.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file is not up to date.")
@click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def bind(check: bool, diff: bool, debug: bool) -> None:
    """Write or update src/conf.yaml of a data job from the constructors' defaults. Your edits stay."""
    with clean_exit(debug=debug):
        for line in data.bind(check=check, diff=diff):
            click.echo(line)


@group.command(context_settings={"ignore_unknown_options": True})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--verbose", is_flag=True, help="Show what Ray prints.")
@click.argument("overrides", nargs=-1)
def run(debug: bool, verbose: bool, overrides: tuple[str, ...]) -> None:
    """Run the data job here. OVERRIDES are Hydra's: cfg.path=data/small cfg.start_workers=8"""
    if debug:
        os.environ["MLX_DEBUG"] = "1"
    if verbose:
        be_verbose()
    with clean_exit():
        data.run(overrides)


@group.command(context_settings={"ignore_unknown_options": True})
@address_option
@click.option("--check", is_flag=True, help="Only look whether it would run there.")
@click.option("-f", "--follow", is_flag=True, help="Show what the job prints, and end with its exit code.")
@click.option("--pip", is_flag=True, help="Let the cluster install what requirements.txt names.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.argument("overrides", nargs=-1)
def launch(
    ray_address: str | None, check: bool, follow: bool, pip: bool, debug: bool, overrides: tuple[str, ...]
) -> None:
    """Run the data job on a Ray cluster, detached. OVERRIDES are Hydra's: cfg.start_workers=64"""
    with clean_exit(debug=debug):
        try:
            code = data.launch(overrides, ray_address=ray_address, check=check, follow=follow, pip=pip)
        except KeyboardInterrupt:
            click.echo("\nif the job was submitted, it goes on", err=True)
            code = 130
    sys.exit(code)


@group.command()
@click.option("--depth", type=click.IntRange(min=0), default=2, show_default=True, help="Levels to list.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Largest entries of a folder; 0: all."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@address_option
@click.argument("path", type=WORD, required=False)
def show(depth: int, limit: int, as_json: bool, ray_address: str | None, path: str | None) -> None:
    """Show what is in the storage, or in PATH below it, with sizes; through a cluster where only that has it."""
    with clean_exit():
        found = data.show(path, depth, limit, ray_address)
        if as_json and JOB_FLAG in os.environ:  # somebody looks for it in the log of this job
            click.echo(data.SHOWN + json.dumps(found.as_json()))
        elif as_json:
            click.echo(json.dumps(found.as_json(), indent=2))
        else:
            for line in found.lines():
                say(line)
        if found.unreadable:
            named = ", ".join(found.unreadable[:5]) + ", …" * (len(found.unreadable) > 5)
            raise StorageError(f"the sizes leave out what could not be read: {named}")


@group.command()
@click.option("--prepared", is_flag=True, help="Prepared sets, except those that a run is reading.")
@click.option(
    "--older-than", metavar="DAYS", type=click.FloatRange(min=0), help="Only those that were not used for so long."
)
@click.option(
    "--larger-than",
    metavar="GB",
    type=click.FloatRange(min=0),
    help="Only the longest unused, until the rest is smaller.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.argument("path", type=WORD, required=False)
def rm(prepared: bool, older_than: float | None, larger_than: float | None, yes: bool, path: str | None) -> None:
    """Remove PATH from the storage, a file or a folder with all that is in it; or prepared sets.

    Without prepared sets later runs read the datasets themselves, or prepare them again.
    """
    with clean_exit():
        if path is not None and (prepared or older_than is not None or larger_than is not None):
            raise UsageError("remove a PATH, or --prepared sets; give one of them")
        if path is not None:
            _remove_path(path, yes)
        elif prepared:
            _remove_prepared(older_than, larger_than, yes)
        else:
            raise UsageError("remove what? A part of the storage: mlx data rm PATH; prepared sets: add --prepared")


def _remove_path(path: str, yes: bool) -> None:
    place, found = data.removable(path)
    top = found.top
    what = f"{top.files:,} file{'s' * (top.files != 1)}, " if top.kind == "folder" else ""
    what = "a link; what it leads to stays" if top.kind == "link" else what + size_text(top.size_bytes)
    if found.unreadable:
        what += f", and {len(found.unreadable):,} that cannot be read"
    if not yes:
        agree(f"remove {place.title}, {what}?")
    data.remove(place, found)
    say(f"removed {place.title}, {what}")


def _remove_prepared(older_than: float | None, larger_than: float | None, yes: bool) -> None:
    store = data.prepared_store()
    limited = older_than is not None or larger_than is not None
    endless = float("inf") if limited else -1.0
    days = endless if older_than is None else older_than
    gigabytes = endless if larger_than is None else larger_than
    sets = data.unwanted_prepared(store, days, gigabytes)
    if not sets:
        say(f"nothing to remove in {store.root}")
        return
    for item in sets:
        rows = f"{item.manifest.rows:,} rows" if item.manifest else "incomplete"
        say(f"{item.name}  {rows}  {item.size_bytes / 1e6:,.1f} MB  unused for {item.age_s / 86_400:.1f} days")
    size = sum(item.size_bytes for item in sets) / 1e6
    if not yes:
        agree(f"remove {len(sets)} of {store.root}, {size:,.1f} MB?")
    gone = data.remove_prepared(store, sets)
    say(f"removed {len(gone)}, {sum(item.size_bytes for item in gone) / 1e6:,.1f} MB")
