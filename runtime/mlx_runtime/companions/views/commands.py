"""Commands that show runs."""

import sys
from pathlib import Path

import click

from mlx_runtime import companions
from mlx_runtime.cli import options
from mlx_runtime.cli.options import MODES, PAGE, job_statuses, say, word
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import SWEEP, RunFolder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import print_table
from mlx_runtime.storage.files import to_json


@click.command("diff")
@click.argument("words", type=word, metavar="[NAME] A B", nargs=-1)
@options.json
def xp_diff(words: tuple[str, ...], as_json: bool) -> None:
    """Show the differences between two runs.

    A and B are run_003, 3 or latest of NAME (default: the experiment in the working directory), name/run_003, or a path
    or URI.
    """
    from mlx_runtime.companions.views import difference

    a, b = _two_runs(words, "diff")
    found = difference.difference(a, b, job_statuses)
    if as_json:
        click.echo(to_json({"a": a.location, "b": b.location} | found), nl=False)
    elif any(found.values()):
        print_table(difference.table(a, b, found), sys.stdout, whole=True)
    else:
        say(f"{a.title} and {b.title} do not differ", err=True)


@click.command("compare")
@click.argument("words", type=word, metavar="[NAME] A B", nargs=-1)
@click.option("--metric", metavar="M", type=word, help="Metric, like val/accuracy. Default: the one that A monitors.")
@click.option("--mode", type=MODES, help="Which value is best. Default: cfg.mode of A or B.")
@options.json
def xp_compare(words: tuple[str, ...], metric: str | None, mode: str | None, as_json: bool) -> None:
    """Compare two configs over seeds and folds, with a confidence interval.

    A and B, as for mlx xp diff, stand for all runs with the same code and config, except for seed and fold. A sweep
    (sweep_001) stands for its best trial.
    """
    from mlx_runtime.companions.views import comparison

    found = comparison.compare(*_two_runs(words, "compare"), metric, mode, job_statuses)
    if as_json:
        click.echo(to_json(found), nl=False)
    else:
        for line in comparison.lines(found):
            say(line)


def _two_runs(words: tuple[str, ...], verb: str) -> tuple[RunFolder, RunFolder]:
    """Return the two runs of `[NAME] A B`."""
    if len(words) not in (2, 3):
        raise UsageError(f"which two runs? mlx xp {verb} A B, or: mlx xp {verb} NAME A B")
    a, b = (lookup.resolve_run(words[0], run) if len(words) == 3 else lookup.resolve_run(run) for run in words[-2:])
    return a, b


@click.command("report")
@options.name()
@options.run("latest")
@click.option("-o", "--output", type=PAGE, help="Default: report.html in the run's folder.")
def xp_report(name: str, run: str, output: Path | None) -> None:
    """Write a web page about a RUN (run_003, 3 or latest) of NAME, with curves and log, or a sweep (sweep_001)."""
    from mlx_runtime.companions.views import report

    folder = lookup.resolve_run(name, run)
    if folder.name.startswith(SWEEP):
        sweep = companions.part("sweeps.results").SweepResult(folder)
        page = companions.part("sweeps.report").render_sweep(sweep, job_statuses)
    else:
        page = report.render_run(folder, job_statuses)
    if output is None:
        say(report.store(page, folder))
    else:
        report.write(page, output)
        say(output)
