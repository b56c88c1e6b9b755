"""`mlx data`.

A data job has a folder like that of a run, besides the folder that it fills:

<storage>/.jobs/<name>/run_001/
    run.json        status, output, command, job on a cluster (see `records`)
    conf.yaml       the resolved config
    logs/driver.log output of the job
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from mlx_runtime import companions
from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import confirm, job_statuses, say, word
from mlx_runtime.cli.verbs import projects, xp
from mlx_runtime.cli.xp import log_options, print_log
from mlx_runtime.companions.jobs import contents
from mlx_runtime.companions.jobs.filling import JOBS
from mlx_runtime.config.projects import DATA_JOB
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import RunFolder, find_run, list_runs
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries.listing import Row, summarize
from mlx_runtime.runs.tables import print_table
from mlx_runtime.settings import environment
from mlx_runtime.storage.files import is_uri, join_path, prepared_root, size_text, to_json

data_new = commands.new_command(DATA_JOB)
data_bind = commands.bind_command(DATA_JOB)


@click.command("run", context_settings=commands.OVERRIDES)
@options.verbosity
@commands.resume_option
@click.argument("overrides", nargs=-1)
def data_run(resume: bool, overrides: tuple[str, ...]) -> None:
    """Run the data job on this machine. OVERRIDES are Hydra's: cfg.path=data/small cfg.start_workers=8"""
    projects.run(DATA_JOB, Request(overrides + ("cfg.resume=true",) * resume))


@click.command("ls")
@options.json
@click.argument("name", type=word, required=False)
def data_ls(as_json: bool, name: str | None) -> None:
    """List all data jobs in the storage, or those of NAME, and their outputs."""
    root = lookup.storage_root()
    rows = summarize(list_runs(join_path(root, JOBS), name), job_statuses)
    if as_json:
        click.echo(to_json([_fields(row) for row in rows]), nl=False)
    elif rows:
        print_table([_cells(row, root) for row in rows], sys.stdout)
        say(f"outputs are in {root}", err=True)
    else:
        say(f"there are no data jobs in {root} yet; start one with: mlx data run", err=True)


def _fields(row: Row) -> dict[str, Any]:
    """Return plain values for `--json`."""
    names = ("status", "problem", "start", "end", "age_s", "duration_s", "error", "job", "attempts", "place")
    known, own = row.fields(), ("output", "files", "size_bytes")
    fields = {"name": known["experiment"], "run": known["run"]} | {name: known[name] for name in names}
    return fields | {name: row.record.get(name) for name in own}


def _cells(row: Row, root: str) -> dict[str, str]:
    """Return the cells of a table row by column, with the output relative to the storage at `root`."""
    known, record = row.cells(), row.record
    output = str(record.get("output") or "-").partition("?")[0]
    size = record.get("size_bytes")
    return {
        "name": known["experiment"],
        "run": known["run"],
        "status": known["status"],
        "output": output.removeprefix(f"{root.partition('?')[0].rstrip('/')}/"),
        "files": "-" if size is None else f"{record.get('files'):,}",
        "size": "-" if size is None else size_text(size),
        "age": known["age"],
        "duration": known["duration"],
        "job": (record.get("job") or {}).get("id", "-"),
    }


@click.command("logs")
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
@log_options
def data_logs(name: str, run: str, follow: bool | None, tail: int | None) -> None:
    """Print the output of a data job NAME, the latest or another RUN (run_003 or 3).

    Without --no-follow, the exit code is that of the job, as of mlx xp logs.
    """
    sys.exit(print_log(_find_job(name, run), follow=follow, tail=tail))


@click.command("stop")
@click.argument("name", type=word)
@click.argument("run", type=word, default="latest")
def data_stop(name: str, run: str) -> None:
    """Stop a data job NAME, the latest or another RUN (run_003 or 3). Its output is not published."""
    say(xp.stop(_find_job(name, run)))


def _find_job(name: str, run: str) -> RunFolder:
    """Return the folder of a data job in the storage, by its name and number, or by its path or URI."""
    return lookup.resolve_run(name) if "/" in name else find_run(join_path(lookup.storage_root(), JOBS), name, run)


@click.command("show")
@click.option("--depth", type=click.IntRange(min=0), default=2, show_default=True, help="Levels to list.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Largest entries per folder; 0: all."
)
@options.json
@options.address
@click.argument("path", type=word, required=False)
def data_show(depth: int, limit: int, as_json: bool, ray_address: str | None, path: str | None) -> None:
    """Show the contents of the storage, or of PATH in it, with sizes; through a cluster if only that can see it."""
    with environment({"RAY_ADDRESS": ray_address} if ray_address else {}, replace=True):
        root = lookup.storage_root()
        if not is_uri(root) and not Path(root).is_dir():
            raise UsageError(
                f"{root} does not exist on this machine; if only a cluster has it, pass --ray-address http://HEAD:8265"
            )
        found = contents.survey(contents.path_in(root, path or ""), depth)
    if as_json:
        click.echo(json.dumps(found.as_json(limit), indent=2))
        return
    for line in found.lines(limit):
        say(line)


@click.command("rm")
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
def data_rm(prepared: bool, older_than: float | None, larger_than: float | None, yes: bool, path: str | None) -> None:
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
    path = contents.path_in(lookup.storage_root(), text)
    contents.refuse_in_use(path)
    found = contents.survey(path, 0)
    title = f"{path.title}, {found.files:,} file{'s' * (found.files != 1)}, {size_text(found.size_bytes)}"
    if not yes:
        confirm(f"remove {title}?")
        contents.refuse_in_use(path)  # a run may have begun
    contents.remove(path)
    say(f"removed {title}")


def _remove_prepared(older_than: float | None, larger_than: float | None, yes: bool) -> None:
    path = lookup.conf_value("cfg.preparation.path")
    root = path or prepared_root(lookup.storage_root(), None)
    store = companions.part("prepared.store").Store(root)
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
