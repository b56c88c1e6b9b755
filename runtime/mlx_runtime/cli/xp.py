"""`mlx xp`."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from mlx_runtime import companions
from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import MODES, confirm, job_statuses, say, word
from mlx_runtime.cli.verbs import xp
from mlx_runtime.companions import is_remote
from mlx_runtime.errors import UsageError, printable
from mlx_runtime.runs.folder import SWEEP, RunFolder
from mlx_runtime.runs.queries import listing, lookup, ranking
from mlx_runtime.runs.tables import print_table
from mlx_runtime.storage.files import to_json


def log_options(function: options.Function) -> options.Function:
    """Add the options of `print_log` for runs and data jobs."""
    function = click.option("--tail", metavar="N", type=click.IntRange(min=0), help="Start with the last N lines.")(
        function
    )
    return click.option(
        "-f/ ",
        "--follow/--no-follow",
        default=None,
        help="Wait for the end and exit with its code, or only print existing output. Default: follow a live one.",
    )(function)


@click.group("xp", cls=commands.Group)
def group() -> None:
    """List, inspect and stop runs."""


@group.command()
@options.name(required=False)
@click.option("--status", type=click.Choice(listing.STATUSES, case_sensitive=False), help="Only runs in this state.")
@click.option(
    "--sort",
    metavar="METRIC",
    type=word,
    help="Best run first, by the mode of runs that monitor METRIC; by default, smallest value first.",
)
@click.option("--mode", type=MODES, help="Sort the maximum or the minimum of METRIC first.")
@click.option("--sweep", metavar="SWEEP", type=word, help="Only runs of this sweep, with their values.")
@options.json
def ls(
    name: str | None,
    status: str | None,
    sort: str | None,
    mode: str | None,
    sweep: str | None,
    as_json: bool,
) -> None:
    """List all runs, or those of NAME, on this machine and on clusters. Runs of a sweep follow it.

    NAME may also be the repository of a mirrored run, like hf://user/name.
    """
    rows = listing.list_rows(
        name, status=status, sweep=sweep, sort=sort, mode=mode, ask=job_statuses, empty_sweeps=sort is None
    )
    if as_json:
        click.echo(to_json([row.fields() for row in rows]), nl=False)
    elif rows:
        print_table(_table(rows, sort, sweep), sys.stdout)
        for row in rows if status == "FAILED" else ():
            first, _, _ = (row.record.get("error") or "unknown error").partition("\n")
            say(f"{row.folder.title}: {first}", err=True)
        for row in rows:
            if row.problem is not None:
                say(f"note: {row.problem}; repair it, or remove the run with mlx xp rm --force", err=True)
    else:
        root = lookup.storage_root()
        none = f"there are no runs in {root} yet; start one with: mlx train run"
        say(f"no run in {root} is {status}" if status else none, err=True)


def _table(rows: Sequence[listing.Row], sort: str | None, sweep: str | None) -> list[dict[str, str]]:
    """Return a listing as rows of a table: sorted, of one sweep, or with a line per sweep above its runs."""
    if sweep is None and (sort is not None or not any(row.sweep for row in rows)):
        return [row.cells(sort) for row in rows]
    sweeps = companions.part("sweeps.listing")
    found: list[dict[str, str]] = sweeps.grouped(rows) if sweep is None else sweeps.table(rows, sort)
    return found


@group.command()
@options.name()
@options.run()
@click.option("--metric", metavar="M", type=word, help="Metric, like val/accuracy. Default: that of the latest run.")
@click.option("--mode", type=MODES, help="Which value is best. Default: cfg.mode of runs that monitor the metric.")
@options.json
def best(name: str, run: str | None, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Print the run and the checkpoint of NAME with the best value of a metric.

    With a RUN (run_003, 3 or latest), print its best checkpoint; with a sweep (sweep_001), its best trial.
    """
    one = run is not None or ("/" in name and not is_remote(name))
    folder = lookup.resolve_run(name, run) if one else None
    if folder is not None and folder.name.startswith(SWEEP):
        if metric or mode:
            raise UsageError("a sweep has its own metric; leave out --metric and --mode")
        result = companions.part("sweeps.results").SweepResult(folder)
        found, lines = result.summary(), result.lines()
    else:
        found = ranking.best(name, metric, mode, folder, warn=lambda text: say(text, err=True))
        lines = ranking.best_lines(found)
    if as_json:
        click.echo(to_json(found), nl=False)
    else:
        for line in lines:
            say(line)


@group.command()
@options.name()
@options.run()
@options.yes
@click.option("--force", is_flag=True, help="Remove even a run whose record cannot be read. It may be training.")
def rm(name: str, run: str | None, yes: bool, force: bool) -> None:
    """Remove a RUN (run_003, 3 or latest) of NAME with its checkpoints, unless it is training."""
    folder = lookup.resolve_run(name, _require_run(name, run, "rm"))
    xp.refuse_living(folder, force=force)
    title = xp.size_title(folder)
    if not yes:
        confirm(f"remove {title}?")
    xp.remove(folder, force=force)
    say(f"removed {title}")


@group.command()
@options.name()
@options.run("latest")
@log_options
@click.option("--rank", type=click.IntRange(min=0), help="Only the output of this worker.")
def logs(name: str, run: str, follow: bool | None, rank: int | None, tail: int | None) -> None:
    """Print the output of a RUN (run_003, 3 or latest) of NAME, wherever it trains or trained.

    Without --no-follow, the exit code is that of the run: 0 if it has SUCCEEDED or was PRUNED, 143 if it was STOPPED, 1
    if it has FAILED or is STALE.
    """
    folder = lookup.resolve_run(name, run)
    code = print_log(folder, follow=follow, rank=rank, tail=tail)
    if code == 1 and (text := xp.lost_driver(folder)):
        say(text, err=True)
    sys.exit(code)


@group.command()
@options.name()
@options.run("latest")
@options.json
def ps(name: str, run: str, as_json: bool) -> None:
    """Show where each worker of a RUN (run_003, 3 or latest) of NAME is: node, step, its age, and line of code."""
    found = xp.locate(name, run)
    if as_json:
        click.echo(to_json(found), nl=False)
        return
    say(xp.positions_title(found))
    print_table(xp.positions_table(found), sys.stdout)


@group.command()
@options.name()
@options.run()
def stop(name: str, run: str | None) -> None:
    """Stop a RUN (run_003, 3 or latest) of NAME after its current step, with a checkpoint."""
    say(xp.stop(lookup.resolve_run(name, _require_run(name, run, "stop"))))


@group.command()
@options.name(required=False)
@options.run()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=6006,
    show_default=True,
    help="Port of the page, on this machine only; 0 means any free port.",
)
def board(name: str | None, run: str | None, port: int) -> None:
    """Open TensorBoard for the whole storage, an experiment or folder NAME, or its RUN (run_003, 3 or latest)."""
    xp.board(name, run, port)


def print_log(folder: RunFolder, **settings: Any) -> int:
    """Print the output of a run or data job. Return an exit code."""
    try:
        return xp.logs(folder, echo_stored, **settings)
    except KeyboardInterrupt:
        click.echo("\nthe run continues; only its log was closed", err=True)
        return 130


def echo_stored(text: str, *, err: bool = False) -> None:
    """Print a part of a log, without escape sequences other than those for colors."""
    parts = re.split(r"(\x1b\[[\d;]*m|\r)", text)
    safe = "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))
    click.echo(safe, nl=False, err=err)


def _require_run(name: str, run: str | None, verb: str) -> str:
    """Return the run, which has no default in destructive commands."""
    if run is None and "/" not in name:
        raise UsageError(f"which run? For the latest: mlx xp {verb} {name} latest")
    return run or "latest"
