"""`mlx train`."""

from pathlib import Path
from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import UsageError
from mlx_runtime.runs import lookup
from mlx_runtime.runs.folder import names_run, refuse_empty


@click.group("train")
def group() -> None:
    """Create, bind and run an experiment."""


group.add_command(commands.new_command(AN_EXPERIMENT))
group.add_command(commands.bind_command(AN_EXPERIMENT))

prepare_option = click.option("--prepare-batches", "make", is_flag=True, help="Prepare the datasets first, if needed.")
variant_option = click.option(
    "--variant", "variants", multiple=True, metavar="NAME", help="Apply src/variants/NAME.yaml to conf.yaml."
)


class _WithVariants(click.Command):
    """A command whose `--help` lists the variants of the experiment in the working directory."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        folder = Path("src/variants")
        names = [f"--variant {file.stem}" for file in sorted(folder.glob("*.yaml"))]
        names += [f"{file.parent.name}={file.stem}" for file in sorted(folder.glob("*/*.yaml"))]
        self.epilog = f"Variants: {', '.join(names)}" if names else None
        super().format_epilog(ctx, formatter)


code_option = click.option(
    "--code",
    type=click.Choice(["stored"]),
    help="Use the code that the run stored. Anyone who can write to its storage could have put any code there.",
)
from_option = click.option("--from", "origin", metavar="RUN", help="Start a new run with the config of another.")


@group.command(cls=_WithVariants, context_settings=commands.OVERRIDES)
@options.json
@options.debug
@variant_option
@click.option("--settings", is_flag=True, help="Explain the settings in cfg instead, or the one that KEY names.")
@click.argument("arguments", nargs=-1, metavar="[KEY] [OVERRIDES]...")
def show(as_json: bool, settings: bool, variants: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Print the config that a run would have, and where each changed value came from."""
    if settings:
        click.echo("\n".join(projects.settings(arguments)))
        return
    click.echo(projects.show([*arguments, *_words(variants)], as_json=as_json), nl=False)


@group.command(cls=_WithVariants, context_settings=commands.OVERRIDES)
@options.verbosity
@click.option("--fast-dev-run", "fast", is_flag=True, help="Check in seconds that the code runs; keep nothing.")
@click.option("--overfit", metavar="N", type=click.IntRange(min=1), help="Train on the same first N batches only.")
@click.option("--profile", is_flag=True, help="Profile a few training steps, and print what took longest.")
@prepare_option
@click.option("--no-prepared", "never", is_flag=True, help="Read samples, even of prepared datasets.")
@click.option("--resume", metavar="[RUN]", is_flag=False, flag_value="latest", help="Resume RUN, or the latest run.")
@code_option
@from_option
@variant_option
@click.argument("overrides", nargs=-1)
def run(
    fast: bool,
    overfit: int | None,
    profile: bool,
    make: bool,
    never: bool,
    resume: str | None,
    code: str | None,
    origin: str | None,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
) -> None:
    """Train on this machine. OVERRIDES are Hydra's: cfg.num_epochs=3 optimizers.adam.lr=1e-4"""
    if make and (never or fast):
        other = "--no-prepared" if never else "--fast-dev-run"
        raise UsageError(f"--prepare-batches and {other} contradict each other; pass one of them")
    # ++ also adds a setting that conf.yaml lacks because it was bound before the setting existed
    implied = {
        "cfg.preparation.mode=make": make,
        "cfg.preparation.mode=never": never,
        "--fast-dev-run": fast,
        f"++cfg.debug.overfit_batches={overfit}": overfit,
        "++cfg.debug.profile=true": profile,
        f"--from={origin}": origin,
    }
    refuse_empty({"--resume": resume, "--from": origin})
    resumed = ["--resume", resume] if resume else []  # `resume` may be the first override
    words = [*_words(variants), *(option for option, given in implied.items() if given), *resumed]
    if code and not resume:
        raise UsageError("--code=stored goes with --resume: it is the code of that run")
    named = resume if resume and names_run(resume) else "latest"
    projects.run(AN_EXPERIMENT, [*overrides, *words], code_of=lookup.resolve_run(named) if code else None)


@group.command(context_settings=commands.OVERRIDES)
@options.verbosity
@click.option("--trials", metavar="N", type=click.IntRange(min=1), help="Number of trials. Default: the whole grid.")
@click.option("--search", type=click.Choice(["grid", "random", "optuna"]), help="Default: grid; optuna for intervals.")
@click.option("--scheduler", type=click.Choice(["none", "asha"]), help="Whether to end bad trials early.")
@click.option("--metric", metavar="M", help="Metric that compares trials. Default: cfg.monitor.")
@click.option("--mode", type=click.Choice(["max", "min"]), help="Which is best. Default: cfg.mode.")
@click.option("--folds", metavar="K", type=click.IntRange(min=2), help="Cross-validate each trial.")
@click.option("--parallel", metavar="N", type=click.IntRange(min=1), help="Runs at a time. Default: as many as fit.")
@click.option("--gpus-per-trial", metavar="X", type=options.gpus, help="Below 1, runs share a GPU.")
@click.option("--name", metavar="NAME", help="Name of the sweep. Default: the next number.")
@click.option(
    "--max-time", "max_time_s", metavar="TIME", type=options.duration_s, help="Stop after this time: 90m, 2h, …"
)
@click.option("--resume", metavar="[NAME]", is_flag=False, flag_value="latest", help="Run what a sweep lacks.")
@click.option("--retry-failed", is_flag=True, help="With --resume, run failed trials again.")
@click.option("--force", is_flag=True, help="With --resume, although overrides or code have changed.")
@from_option
@variant_option
@options.yes
@click.argument("overrides", nargs=-1)
def sweep(**settings: Any) -> None:
    """Train many runs with different values: optimizers.adam.lr=1e-3,1e-4 models.net.width="int(interval(16,128))"

    OVERRIDES are Hydra's: lists of values, choice(...), range(...), interval(...) and tag(log, interval(...)).
    """
    words, definition, how = sweep_request(**settings)
    projects.sweep(words, definition, **how)


def sweep_request(
    resume: str | None,
    origin: str | None,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
    max_time_s: float | None,
    name: str | None,
    retry_failed: bool,
    force: bool,
    yes: bool,
    **definition: Any,
) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """Return the overrides, the definition and the other settings of a sweep, as the options of `sweep` give them."""
    refuse_empty({"--resume": resume, "--from": origin})
    if resume and not names_run(resume):  # an override; the sweep has no name
        resume, overrides = "latest", (resume, *overrides)
    if resume is None and (retry_failed or force):
        raise UsageError(f"{'--retry-failed' if retry_failed else '--force'} goes with --resume")
    words = (*overrides, *_words(variants), *([f"--from={origin}"] if origin else []))
    given = {key: value for key, value in definition.items() if value is not None}
    how = {"resume": resume, "retry_failed": retry_failed, "force": force, "large": yes, "max_time_s": max_time_s}
    return words, given, how | {"name": name or ""}


@group.command("eval", context_settings=commands.OVERRIDES)
@options.verbosity
@click.option(
    "--checkpoint", "which", metavar="WHICH", type=options.word, help="Of RUN: latest (default), best, or epoch_0004."
)
@code_option
@variant_option
@click.argument("arguments", nargs=-1, metavar="[RUN|PATH] [OVERRIDES]...")
def evaluate(which: str | None, code: str | None, variants: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Evaluate a checkpoint without training: run eval_loop, and store the results in the run's folder.

    RUN is run_003, 3 or latest (the default), or name/run_003. PATH is the folder or URI of a run or of a checkpoint.
    """
    named = [item for item in arguments[:1] if names_run(item)]
    folder, checkpoint = lookup.resolve_checkpoint(named[0] if named else "latest", which)
    words = [f"--from={folder.location}", f"--eval={checkpoint}", *_words(variants)]
    projects.run(AN_EXPERIMENT, [*words, *arguments[len(named) :]], code_of=folder if code else None)


@group.command(context_settings=commands.OVERRIDES)
@click.option("--sweep", "many", is_flag=True, help="Run a sweep there; all options of mlx train sweep apply.")
@click.option("--name", metavar="NAME", help="Experiment that the run belongs to: cfg.name. Of a sweep, its name.")
@prepare_option
@click.option("--run", "--resume", "resume", metavar="RUN", help="Resume RUN (run_003, 3 or latest).")
@click.option("--code", hidden=True)
@from_option
@variant_option
@commands.launch_options
def launch(
    many: bool,
    make: bool,
    name: str | None,
    resume: str | None,
    code: str | None,
    origin: str | None,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
    **settings: Any,
) -> None:
    """Train on a Ray cluster, detached. OVERRIDES are Hydra's: cfg.start_workers=8 optimizers.adam.lr=1e-4"""
    refuse_empty({"--resume": resume, "--from": origin})
    if code is not None:
        stored = lookup.resolve_run(resume or "latest").location
        raise UsageError(
            "--code goes with mlx train run, because a launch uploads the working directory. To launch the code that "
            f"the run stored, unpack it into a copy of this folder, and launch there: unzip -o {stored}/code.zip"
        )
    implied = {"cfg.preparation.mode=make": make, f"{'--name' if many else 'cfg.name'}={name}": name}
    implied |= {f"--resume={resume}": resume, f"--from={origin}": origin}
    words = [*overrides, *_words(variants), *(option for option, given in implied.items() if given)]
    if many:  # the words that are no options here are those of `sweep`
        request = sweep_request(**sweep.make_context("launch --sweep", words).params)
        commands.launch_and_exit(AN_EXPERIMENT, request[0], sweep=request, **settings)
    commands.launch_and_exit(AN_EXPERIMENT, words, **settings)


@group.command(context_settings=commands.OVERRIDES)
@options.verbosity
@variant_option
@click.argument("overrides", nargs=-1)
def prepare(variants: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Map every dataset through ray_map_batches once and store it for later runs."""
    projects.prepare([*overrides, *_words(variants)])


def _words(variants: tuple[str, ...]) -> list[str]:
    return [f"--variant={name}" for name in variants]
