"""The command that runs a sweep."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, Kind, main_class
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import UsageError
from mlx_runtime.importing import add_to_path
from mlx_runtime.runs.folder import SWEEP
from mlx_runtime.settings import prepare_fork


@click.command("sweep", context_settings=commands.OVERRIDES)
@options.verbosity
@click.option("--trials", metavar="N", type=click.IntRange(min=1), help="Number of trials. Default: the whole grid.")
@click.option("--search", type=click.Choice(["grid", "random", "optuna"]), help="Default: grid; optuna for intervals.")
@click.option("--scheduler", type=click.Choice(["none", "asha"]), help="asha ends unpromising trials early.")
@click.option("--metric", metavar="M", help="Metric to compare trials by. Default: cfg.monitor.")
@click.option("--mode", type=click.Choice(["max", "min"]), help="Which values are better. Default: cfg.mode.")
@click.option("--folds", metavar="K", type=click.IntRange(min=2), help="Cross-validate each trial.")
@click.option("--seeds", metavar="N", type=click.IntRange(min=1), help="Train each trial with N seeds, from cfg.seed.")
@click.option("--parallel", metavar="N", type=click.IntRange(min=1), help="Runs at a time. Default: as many as fit.")
@click.option("--gpus-per-trial", metavar="X", type=click.FloatRange(min=0), help="Below 1, runs share a GPU.")
@click.option("--name", metavar="NAME", help="Name of the sweep. Default: the next number.")
@click.option(
    "--max-time", "max_time_s", metavar="TIME", type=options.duration_s, help="Stop after this time: 90m, 2h, …"
)
@click.option("--resume", metavar="[NAME]", is_flag=False, flag_value="latest", help="Train a sweep's missing runs.")
@click.option("--retry-failed", is_flag=True, help="With --resume, run failed trials again.")
@click.option("--force", is_flag=True, help="With --resume, ignore changes of the definition or code.")
@commands.from_option
@commands.variant_option
@options.yes
@click.argument("overrides", nargs=-1)
def train_sweep(**settings: Any) -> None:
    """Train many runs with different values.

    OVERRIDES are Hydra's, like optimizers.adam.lr=1e-3,1e-4 models.net.width="int(interval(16,128))": lists of
    values, choice(...), range(...), interval(...) and tag(log, interval(...)).
    """
    words, definition, how = sweep_request(**settings)
    run(words, definition, **how)


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
    """Return the overrides, the definition and the other settings of a sweep, from the options of `sweep`."""
    request = Request.of(overrides, resume=resume, origin=origin, variants=variants)
    resume = request.resume
    if resume is not None and name:
        raise UsageError("--name is for a new sweep; resume that of another experiment with --resume=EXPERIMENT/SWEEP")
    if resume is None and (retry_failed or force):
        raise UsageError(f"{'--retry-failed' if retry_failed else '--force'} goes with --resume")
    words = (*request.overrides, *([f"--from={origin}"] if origin else []))
    given = {key: value for key, value in definition.items() if value is not None}
    how = {"resume": resume, "retry_failed": retry_failed, "force": force, "large": yes, "max_time_s": max_time_s}
    return words, given, how | {"name": name or ""}


def run(overrides: Sequence[str], definition: Mapping[str, Any], **how: Any) -> None:
    """Run a sweep of the experiment in the working directory, or resume one of a function."""
    experiment = _function_experiment(how["resume"])
    if experiment is None:
        _, experiment = projects.load(AN_EXPERIMENT, overrides, "sweep")
    from mlx_runtime.companions.sweeps import terminal
    from mlx_runtime.companions.sweeps.definition import Definition
    from mlx_runtime.workers.local import warm_up

    warm_up()  # in a job, too
    terminal.run_sweep(experiment, Definition(tuple(overrides), **definition), **how)


def _function_experiment(resume: str | None) -> type | None:
    """Return the experiment that calls the function of a sweep to resume; None for other sweeps."""
    if resume is None or AN_EXPERIMENT.file.is_file():
        return None
    prepare_fork()
    from mlx_runtime.companions.notebook.functions import FunctionExperiment
    from mlx_runtime.companions.sweeps.results import FUNCTIONS, open_sweep

    if open_sweep(resume).definition.get("experiment") != FUNCTIONS:
        return None
    add_to_path(Path.cwd())
    return FunctionExperiment


def launch_steps(
    kind: Kind,
    folder: Path,
    overrides: Sequence[str],
    definition: Mapping[str, Any],
    how: Mapping[str, Any],
    on_ray: bool,
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return two functions: one loads and checks the config of a sweep, binding it if necessary; one submits it.

    With `on_ray`, the job is the driver of a Ray cluster.
    """
    from mlx_runtime.companions.sweeps.definition import Definition
    from mlx_runtime.companions.sweeps.engine import refuse_no_workers
    from mlx_runtime.companions.sweeps.starting import checked_plan, find_sweep
    from mlx_runtime.storage.documents import is_name

    asked, plans = Definition(tuple(overrides), **definition), []

    def load() -> Any:
        projects.bind_first(kind, folder)
        experiment = main_class(kind, folder)
        if how["name"] and not is_name(how["name"]):
            raise UsageError(f"--name {how['name']!r} is not a valid folder name")
        resumed = find_sweep(how["resume"]) if how["resume"] is not None else None
        checks = {
            "force": how["force"],
            "large": how["large"],
            "split": False,
        }  # the datasets may be on the cluster only
        plans.append(checked_plan(experiment, asked, resumed, **checks))
        if on_ray:
            refuse_no_workers(plans[-1].config.cfg)
        return plans[-1].config

    def submit(launch: Any) -> Any:
        given = {key: value for key, value in asked.changed_fields().items() if key != "overrides"}
        flags = {"--retry-failed": how["retry_failed"], "--force": how["force"], "--yes": how["large"]}
        words = [*overrides, *(f"--{key.replace('_', '-')}={value}" for key, value in given.items())]
        words += [flag for flag, wanted in flags.items() if wanted]
        words += [f"--max-time={how['max_time_s']:.0f}s"] if how["max_time_s"] is not None else []
        name = how["name"].removeprefix(SWEEP)
        return launch.submit_sweep(plans[-1].folder, name, words, plans[-1].definition.as_json())

    return load, submit
