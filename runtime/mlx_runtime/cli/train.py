"""`mlx train`."""

import os
import sys
from pathlib import Path

import click

from mlx_runtime import train
from mlx_runtime.cli.words import address_option
from mlx_runtime.errors import UsageError, clean_exit
from mlx_runtime.settings import be_quiet, be_verbose
from mlx_runtime.storage import is_uri


@click.group("train")
def group() -> None:
    """Make, bind and run an experiment."""


@group.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to make it in.")
def new(name: str, output: str) -> None:
    """Make a new experiment in the folder NAME."""
    with clean_exit():
        folder = train.new(name, Path(output))
    click.echo(f"made {folder}; next: cd {folder} && make run")


@group.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file is not up to date.")
@click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def bind(check: bool, diff: bool, debug: bool) -> None:
    """Write or update src/conf.yaml from the constructors' defaults. Your edits stay."""
    with clean_exit(debug=debug):
        for line in train.bind(check=check, diff=diff):
            click.echo(line)


@group.command(context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.argument("arguments", nargs=-1, metavar="[KEY] [OVERRIDES]...")
def show(as_json: bool, debug: bool, arguments: tuple[str, ...]) -> None:
    """Print the config that a run would have, and where each changed value came from."""
    with clean_exit(debug=debug):
        click.echo(train.show(arguments, as_json=as_json), nl=False)


@group.command(context_settings={"ignore_unknown_options": True})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's folder, how it ended, and errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show what Ray prints.")
@click.option("--fast-dev-run", "fast", is_flag=True, help="See in seconds whether all code runs; keep nothing.")
@click.option("--overfit", metavar="N", type=click.IntRange(min=1), help="Train on the same first N batches only.")
@click.option("--profile", is_flag=True, help="Trace a few training steps, and tell what took longest.")
@click.option("--prepare-batches", "make", is_flag=True, help="Prepare the datasets first, if they are not.")
@click.option("--no-prepared", "never", is_flag=True, help="Read samples, even of datasets that are prepared.")
@click.option("--resume", metavar="[RUN]", is_flag=False, flag_value="latest", help="Go on with RUN, or the latest.")
@click.option("--from", "origin", metavar="RUN", help="Start a new run with the config of another.")
@click.argument("overrides", nargs=-1)
def run(
    debug: bool,
    quiet: bool,
    verbose: bool,
    fast: bool,
    overfit: int | None,
    profile: bool,
    make: bool,
    never: bool,
    resume: str | None,
    origin: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Train here. OVERRIDES are Hydra's: cfg.num_epochs=3 optimizers.adam.lr=1e-4"""
    if debug:
        os.environ["MLX_DEBUG"] = "1"
    with clean_exit():
        _be(quiet=quiet, verbose=verbose)
        if make and never:
            raise UsageError("--prepare-batches and --no-prepared contradict each other; give one")
        if make and fast:
            raise UsageError("--prepare-batches takes its time and --fast-dev-run takes none; give one")
        chosen = ["cfg.prepared=make"] if make else ["cfg.prepared=never"] if never else []
        # with ++ also where conf.yaml was bound before there were these settings
        chosen += ["--fast-dev-run"] if fast else []
        chosen += [f"++cfg.overfit_batches={overfit}"] if overfit else []
        chosen += ["++cfg.profile=true"] if profile else []
        chosen += ["--resume", resume] if resume else []  # `resume` may be the first override
        chosen += [f"--from={origin}"] if origin else []
        train.run([*overrides, *chosen])


@group.command("eval", context_settings={"ignore_unknown_options": True})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the numbers, and errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show what Ray prints.")
@click.argument("arguments", nargs=-1, metavar="[RUN|PATH] [OVERRIDES]...")
def evaluate(debug: bool, quiet: bool, verbose: bool, arguments: tuple[str, ...]) -> None:
    """Evaluate a checkpoint without training: run eval_loop, and store its numbers in the run's folder.

    RUN is run_003, 3 or latest (the default), or name/run_003: its latest checkpoint is evaluated. PATH is the folder
    or URI of a run or of a checkpoint.
    """
    from mlx_runtime import xp

    if debug:
        os.environ["MLX_DEBUG"] = "1"
    with clean_exit():
        _be(quiet=quiet, verbose=verbose)
        given = [item for item in arguments[:1] if is_uri(item) or not ("=" in item or item.startswith("~"))]
        folder, checkpoint = xp.checkpoint(given[0] if given else "latest")
        train.evaluate(folder, checkpoint, arguments[len(given) :])


@group.command(context_settings={"ignore_unknown_options": True})
@address_option
@click.option("--check", is_flag=True, help="Only look whether it would run there.")
@click.option("-f", "--follow", is_flag=True, help="Show what the job prints, and end with its exit code.")
@click.option("--pip", is_flag=True, help="Let the cluster install what requirements.txt names.")
@click.option("--prepare-batches", "make", is_flag=True, help="Prepare the datasets first, if they are not.")
@click.option("--name", metavar="NAME", help="Experiment that the run belongs to: cfg.name.")
@click.option("--run", "--resume", "resume", metavar="RUN", help="Go on with RUN (run_003, 3 or latest).")
@click.option("--from", "origin", metavar="RUN", help="Start a new run with the config of another.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the run's folder, and errors; the job's log, too.")
@click.option("-v", "--verbose", is_flag=True, help="Let Ray print in the job's log.")
@click.argument("overrides", nargs=-1)
def launch(
    ray_address: str | None,
    check: bool,
    follow: bool,
    pip: bool,
    make: bool,
    name: str | None,
    resume: str | None,
    origin: str | None,
    debug: bool,
    quiet: bool,
    verbose: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train on a Ray cluster, detached. OVERRIDES are Hydra's: cfg.start_workers=8 optimizers.adam.lr=1e-4"""
    with clean_exit(debug=debug):
        _be(quiet=quiet, verbose=verbose)
        chosen = ["cfg.prepared=make"] if make else []
        chosen += [f"cfg.name={name}"] if name else []
        chosen += [f"--resume={resume}"] if resume else []
        chosen += [f"--from={origin}"] if origin else []
        try:
            code = train.launch([*overrides, *chosen], ray_address=ray_address, check=check, follow=follow, pip=pip)
        except KeyboardInterrupt:
            click.echo("\nif the job was submitted, it goes on; see: mlx xp ls", err=True)
            code = 130
    sys.exit(code)


@group.command(context_settings={"ignore_unknown_options": True})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("-v", "--verbose", is_flag=True, help="Show what Ray prints.")
@click.argument("overrides", nargs=-1)
def prepare(debug: bool, verbose: bool, overrides: tuple[str, ...]) -> None:
    """Map every dataset through ray_map_batches once and store it for later runs."""
    if verbose:
        be_verbose()
    with clean_exit(debug=debug):
        train.prepare(overrides)


def _be(*, quiet: bool, verbose: bool) -> None:
    if quiet and verbose:
        raise UsageError("--quiet and --verbose contradict each other; give one")
    if quiet:
        be_quiet()
    if verbose:
        be_verbose()
