"""`mlx xp`."""

import functools
import sys
from pathlib import Path

import click

from mlx_runtime import comparison, listing, xp
from mlx_runtime.cli.words import WORD, address_option, agree, experiments, runs, say
from mlx_runtime.errors import UsageError, clean_exit
from mlx_runtime.storage import to_json


@click.group("xp")
def group() -> None:
    """Look at runs, and end them."""


MODES = click.Choice(["max", "min"])


@group.command()
@click.argument("name", type=WORD, required=False, shell_complete=experiments)
@click.option("--status", type=click.Choice(listing.STATUSES, case_sensitive=False), help="Only runs in this state.")
@click.option(
    "--sort",
    metavar="METRIC",
    type=WORD,
    help="Best first: runs that monitor METRIC say what is best, else the smallest.",
)
@click.option("--mode", type=MODES, help="Whether the max or the min of METRIC comes first.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a web page to this file instead.")
def ls(
    name: str | None, status: str | None, sort: str | None, mode: str | None, as_json: bool, html: Path | None
) -> None:
    """List all runs, or those of NAME, wherever they train or have trained."""
    with clean_exit():
        found = listing.rows(name, status=status, sort=sort, mode=mode)
        if html is not None:
            from mlx_runtime import report

            report.write(report.of_runs(found), html)
            say(html)
        elif as_json:
            click.echo(to_json([row.fields() for row in found]), nl=False)
        elif found:
            listing.show([row.cells(sort) for row in found], sys.stdout)
        else:
            say(listing.nothing(status), err=True)


@group.command()
@click.argument("words", type=WORD, metavar="[NAME] A B", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def diff(words: tuple[str, ...], as_json: bool) -> None:
    """Show what differs between two runs.

    A and B are run_003, 3 or latest of NAME, or of the experiment here; or name/run_003, a path or URI.
    """
    with clean_exit():
        if len(words) not in (2, 3):
            raise UsageError("which two runs? mlx xp diff A B, or: mlx xp diff NAME A B")
        a, b = (xp.chosen(words[0], run) if len(words) == 3 else xp.named(run) for run in words[-2:])
        found = comparison.difference(a, b)
        if as_json:
            click.echo(to_json({"a": a.place, "b": b.place} | found), nl=False)
        elif any(found.values()):
            listing.show(comparison.table(a, b, found), sys.stdout)
        else:
            say(f"{a.title} and {b.title} do not differ", err=True)


@group.command()
@click.argument("name", type=WORD, shell_complete=experiments)
@click.option("--metric", metavar="M", type=WORD, help="Like val/accuracy; by default what the latest run monitors.")
@click.option("--mode", type=MODES, help="Which is best; by default as the runs have it that monitor the metric.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def best(name: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Print the run and the checkpoint of NAME in which a metric is best."""
    with clean_exit():
        found = comparison.best(name, metric, mode)
        if as_json:
            click.echo(to_json(found), nl=False)
        else:
            for line in comparison.lines(found):
                say(line)


@group.command()
@click.argument("name", type=WORD, shell_complete=experiments)
@click.argument("run", type=WORD, default="latest", shell_complete=runs)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="By default report.html in the run's folder.",
)
def report(name: str, run: str, output: Path | None) -> None:
    """Write a web page about a RUN (run_003, 3 or latest) of NAME: what it is, its curves, checkpoints and log."""
    from mlx_runtime import report

    with clean_exit():
        folder = xp.chosen(name, run)
        page = report.of_run(folder)
        if output is None:
            say(report.keep(page, folder))
        else:
            report.write(page, output)
            say(output)


@group.command()
@click.argument("name", type=WORD, shell_complete=experiments)
@click.argument("run", type=WORD, required=False, shell_complete=runs)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="With -y, also a run whose record cannot be read: it may be training.")
def rm(name: str, run: str | None, yes: bool, force: bool) -> None:
    """Remove a RUN (run_003, 3 or latest) of NAME with its checkpoints, unless it trains."""
    from mlx_runtime import removal

    with clean_exit():
        found = removal.doomed(name, _given(name, run, "rm"))
        if found.warning and yes and not force:
            raise UsageError(f"{found.warning}. To remove it without a question, add --force")
        if found.warning:
            say(f"warning: {found.warning}", err=True)
        if not yes:
            agree(f"remove {found.title}?")
        removal.remove(found)
        say(f"removed {found.title}")


@group.command()
@click.argument("name", type=WORD, shell_complete=experiments)
@click.argument("run", type=WORD, default="latest", shell_complete=runs)
@click.option(
    "-f/ ",
    "--follow/--no-follow",
    default=None,
    help="Wait for the end of the run and exit with its code, or only print what there is. By default, while it lives.",
)
@click.option("--rank", type=click.IntRange(min=0), help="Only what this worker has printed.")
@click.option("--tail", metavar="N", type=click.IntRange(min=0), help="Begin with the last N lines.")
def logs(name: str, run: str, follow: bool | None, rank: int | None, tail: int | None) -> None:
    """Print what a RUN (run_003, 3 or latest) of NAME has printed, wherever it trains or has trained."""
    with clean_exit():
        echo = functools.partial(click.echo, nl=False)
        try:
            code = xp.logs(name, run, echo, follow=follow, rank=rank, tail=tail)
        except KeyboardInterrupt:
            click.echo("\nthe run goes on; this was only its log", err=True)
            code = 130
    sys.exit(code)


@group.command()
@address_option
def ray(ray_address: str | None) -> None:
    """Print where a cluster's dashboard is, and open it where there is a display."""
    with clean_exit():
        say(xp.dashboard(ray_address))


@group.command()
@click.argument("name", type=WORD, shell_complete=experiments)
@click.argument("run", type=WORD, required=False, shell_complete=runs)
def stop(name: str, run: str | None) -> None:
    """Save a checkpoint of a RUN (run_003, 3 or latest) of NAME at its next step, and end it."""
    with clean_exit():
        say(xp.stop(name, _given(name, run, "stop")))


def _given(name: str, run: str | None, verb: str) -> str:
    """The run that a command needs; none is ended or removed because nothing was said."""
    if run is None and "/" not in name:
        raise UsageError(f"which run? For the latest: mlx xp {verb} {name} latest")
    return run or "latest"


@group.command()
@click.argument("name", type=WORD, required=False, shell_complete=experiments)
@click.argument("run", type=WORD, required=False, shell_complete=runs)
@click.option("--port", default=6006, show_default=True, help="Port of the page, on this machine only.")
def board(name: str | None, run: str | None, port: int) -> None:
    """Open TensorBoard on everything, an experiment or a folder NAME, or its RUN (run_003, 3 or latest)."""
    with clean_exit():
        xp.board(name, run, port)
