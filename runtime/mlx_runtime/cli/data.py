"""`mlx data`."""

import json
import sys

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import confirm, job_statuses, say, word
from mlx_runtime.cli.verbs import data, projects, xp
from mlx_runtime.cli.xp import log_options, print_log
from mlx_runtime.config.projects import DATA_JOB
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import print_table
from mlx_runtime.storage.files import size_text, to_json


@click.group("data", cls=commands.Group)
def group() -> None:
    """Fill, inspect and clean up the storage."""


group.add_command(commands.new_command(DATA_JOB))
group.add_command(commands.bind_command(DATA_JOB))


@group.command(context_settings=commands.OVERRIDES)
@options.verbosity
@commands.resume_option
@click.argument("overrides", nargs=-1)
def run(resume: bool, overrides: tuple[str, ...]) -> None:
    """Run the data job on this machine. OVERRIDES are Hydra's: cfg.path=data/small cfg.start_workers=8"""
    overrides += ("cfg.resume=true",) * resume
    folder = DATA_JOB.folder()
    projects.refuse_options(DATA_JOB, overrides, "run")
    commands.load_config(DATA_JOB, folder, overrides)
    projects.run(DATA_JOB, overrides)


@group.command()
@options.json
@click.argument("name", type=word, required=False)
def ls(as_json: bool, name: str | None) -> None:
    """List all data jobs in the storage, or those of NAME, and their outputs."""
    from mlx_runtime.runs.outputs.jobs import list_jobs

    root = lookup.storage_root()
    rows = list_jobs(root, name, job_statuses)
    if as_json:
        click.echo(to_json([row.fields() for row in rows]), nl=False)
    elif rows:
        print_table([row.cells(root) for row in rows], sys.stdout)
        say(f"outputs are in {root}", err=True)
    else:
        say(f"there are no data jobs in {root} yet; start one with: mlx data run", err=True)


@group.command()
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
@log_options
def logs(name: str, run: str, follow: bool | None, tail: int | None) -> None:
    """Print the output of a data job NAME, the latest or another RUN (run_003 or 3).

    Without --no-follow, the exit code is that of the job, as of mlx xp logs.
    """
    sys.exit(print_log(data.find_job(name, run), follow=follow, tail=tail))


@group.command()
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
def stop(name: str, run: str) -> None:
    """Stop a data job NAME, the latest or another RUN (run_003 or 3). Its output is not published."""
    say(xp.stop(data.find_job(name, run)))


@group.command()
@click.option("--depth", type=click.IntRange(min=0), default=2, show_default=True, help="Levels to list.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Largest entries per folder; 0: all."
)
@options.json
@options.address
@click.argument("path", type=word, required=False)
def show(depth: int, limit: int, as_json: bool, ray_address: str | None, path: str | None) -> None:
    """Show the contents of the storage, or of PATH in it, with sizes; through a cluster if only that can see it."""
    found = data.show(path, depth, limit, ray_address)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        for line in found.lines():
            say(line)
    if found.unreadable:
        listed = ", ".join(found.unreadable[:5]) + ", …" * (len(found.unreadable) > 5)
        raise StorageError(f"the sizes exclude unreadable files and folders: {listed}")


@group.command()
@click.option("--prepared", is_flag=True, help="Remove prepared datasets, except those that a run is reading.")
@click.option("--older-than", metavar="DAYS", type=click.FloatRange(min=0), help="Only those unused for this long.")
@click.option(
    "--larger-than",
    metavar="GB",
    type=click.FloatRange(min=0),
    help="Only the least recently used, until the others are smaller in total.",
)
@options.yes
@click.argument("path", type=word, required=False)
def rm(prepared: bool, older_than: float | None, larger_than: float | None, yes: bool, path: str | None) -> None:
    """Remove PATH, a file or folder, from the storage; or prepared datasets.

    Later runs read samples of the dataset instead, or prepare it again.
    """
    if path is not None and (prepared or older_than is not None or larger_than is not None):
        raise UsageError("a PATH and the options of --prepared contradict each other; pass one of them")
    if path is not None:
        _remove_path(path, yes)
    elif prepared:
        _remove_prepared(older_than, larger_than, yes)
    else:
        raise UsageError("remove what? A part of the storage: mlx data rm PATH; prepared datasets: add --prepared")


def _remove_path(text: str, yes: bool) -> None:
    path, found = data.plan_removal(text)
    top = found.top
    title = f"{top.files:,} file{'s' * (top.files != 1)}, " if top.kind == "folder" else ""
    title = "a link; its target stays" if top.kind == "link" else title + size_text(top.size_bytes)
    if found.unreadable:
        title += f", and {len(found.unreadable):,} that cannot be read"
    if not yes:
        confirm(f"remove {path.title}, {title}?")
    data.remove(path, found)
    say(f"removed {path.title}, {title}")


def _remove_prepared(older_than: float | None, larger_than: float | None, yes: bool) -> None:
    store = data.prepared_store()
    default = -1.0 if older_than is None and larger_than is None else float("inf")
    days = default if older_than is None else older_than
    gigabytes = default if larger_than is None else larger_than
    unwanted = store.unwanted_entries(max_age_s=days * 86_400, max_bytes=gigabytes * 1e9)
    if not unwanted:
        say(f"nothing to remove in {store.root}")
        return
    for item in unwanted:
        rows = f"{item.manifest.rows:,} rows" if item.manifest else "incomplete"
        say(f"{item.name}  {rows}  {item.size_bytes / 1e6:,.1f} MB  unused for {item.age_s / 86_400:.1f} days")
    size = sum(item.size_bytes for item in unwanted) / 1e6
    if not yes:
        confirm(f"remove {len(unwanted)} of {store.root}, {size:,.1f} MB?")
    removed = [item for item in unwanted if store.remove(item.name)]  # some may be in use by now
    say(f"removed {len(removed)}, {sum(item.size_bytes for item in removed) / 1e6:,.1f} MB")
