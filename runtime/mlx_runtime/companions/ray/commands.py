"""Commands for clusters: launch, and the dashboard."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime import companions
from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import Function, say
from mlx_runtime.config.projects import AN_EXPERIMENT, DATA_JOB, Kind
from mlx_runtime.driver.arguments import Request, refuse_options
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.settings import Settings, environment

if TYPE_CHECKING:
    from mlx_runtime.companions.jobs.launching import SubmittedJob
    from mlx_runtime.driver.request import RunConfig


RUNNING = ("ray_address", "retries", "pip")
"""Options of `launch` that are only for a running cluster of Ray."""


def launch_options(function: Function) -> Function:
    """Add the options of `launch_and_exit` and the argument OVERRIDES."""
    for decorator in (
        click.argument("overrides", nargs=-1),
        options.verbosity,
        click.option("--pip", is_flag=True, help="Install the packages of requirements.txt on the cluster."),
        click.option("-f", "--follow", is_flag=True, help="Print the output of the job, and exit with its exit code."),
        click.option("--check", is_flag=True, help="Only check whether the job can run there."),
        options.address,
    ):
        function = decorator(function)
    return function


def launch_and_exit(
    kind: Kind,
    overrides: Sequence[str],
    *,
    sweep: tuple[Sequence[str], Mapping[str, Any], Mapping[str, Any]] | None = None,
    retries: int = 0,
    elsewhere: Callable[..., Any] | None = None,
    ray_address: str | None,
    check: bool,
    follow: bool,
    pip: bool,
    **fields: str | None,
) -> None:
    """Run the experiment or data job in the working directory on a cluster, and exit.

    Further fields are those of `Request`. `sweep` is the result of `sweep_request`, and `elsewhere` prepares a launch
    other than on a running cluster of Ray. The exit code is the job's with `follow`, 130 after Ctrl-C, and 0 otherwise.
    """
    try:
        folder = kind.folder()
        refuse_options(overrides, f"{kind.command} launch")
        from mlx_runtime.companions.ray.addresses import Address
        from mlx_runtime.companions.ray.launch import prepare

        load: Callable[[], RunConfig] = partial(commands.load_config, kind, folder, overrides, **fields)
        submit: Callable[[Any], SubmittedJob] = methodcaller("submit_run")
        if tasks := kind == DATA_JOB:
            load, submit = partial(_load_data_job, load), methodcaller("submit_data_job")
        if sweep is not None:
            load, submit = companions.part("sweeps.commands").launch_steps(kind, folder, *sweep)
        if elsewhere is not None:
            trials = None if sweep is None else sweep[1].get("parallel", 1)
            prepared = elsewhere(folder, load, trials=trials, show_all=check)
        else:
            given = folder, Address.parse(ray_address), load
            prepared = prepare(*given, pip=pip, retries=retries, tasks=tasks, show_all=check)
        code = 0
        if not check:
            job = submit(prepared)
            quiet = Settings.read().quiet
            for title, text in job.facts.items():
                if title == "folder" or not quiet:
                    print(f"{title:<9} {text}")
            if follow:
                code = job.follow()
            else:
                status = job.wait()
                if status and not quiet:
                    print(f"status    {status}")
    except KeyboardInterrupt:
        click.echo("\nif the job was submitted, it keeps running", err=True)
        code = 130
    sys.exit(code)


def _load_data_job(load: "Callable[[], RunConfig]") -> "RunConfig":
    """Load the config of a data job; raise an error if its output exists or is being filled."""
    config = load()
    companions.part("jobs.datajob").refuse_present(config)
    return config


@click.command("launch", context_settings=commands.OVERRIDES)
@click.option("--sweep", "many", is_flag=True, help="Run a sweep there, with any options of mlx train sweep.")
@click.option(
    "--kube", "place", flag_value="kubernetes", help="Train on Kubernetes: mlx train launch --kube -- --help."
)
@click.option("--slurm", "place", flag_value="slurm", help="Train on Slurm: mlx train launch --slurm -- --help.")
@click.option("--name", metavar="NAME", help="Name of the experiment, cfg.name; with --sweep, name of the sweep.")
@commands.prepare_option
@click.option(
    "--retries", metavar="N", type=click.IntRange(min=0), default=0, help="Resume at most N times if the driver dies."
)
@click.option("--resume", metavar="[RUN]", is_flag=False, flag_value="latest", help="Resume RUN.")
@commands.from_option
@commands.variant_option
@launch_options
def train_launch(
    many: bool,
    place: str | None,
    make: bool,
    name: str | None,
    resume: str | None,
    origin: str | None,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
    **settings: Any,
) -> None:
    """Train on a Ray cluster, detached. OVERRIDES are Hydra's: cfg.start_workers=8 optimizers.adam.lr=1e-4"""
    request = Request.of(overrides, resume=resume, origin=origin, make=make)
    resume, overrides = request.resume, request.overrides
    if place is not None:  # words that are not options here may be options of that companion
        if given := [name for name in RUNNING if settings[name]]:
            flag, there = f"--{given[0].replace('_', '-')}", "--kube" if place == "kubernetes" else f"--{place}"
            raise UsageError(f"{flag} is for a running cluster of Ray; leave it out, or leave out {there}")
        overrides, settings["elsewhere"] = companions.part(f"{place}.commands").parse(overrides)
    else:
        _refuse_elsewhere(overrides, settings["ray_address"])
    if many:  # words that are not options here are options of `sweep`
        sweeps = companions.part("sweeps.commands")
        typed = sweeps.train_sweep.make_context("launch --sweep", [*overrides]).params
        typed |= {"resume": resume, "origin": origin, "variants": variants, "name": name}
        request = sweeps.sweep_request(**typed)
        launch_and_exit(AN_EXPERIMENT, request[0], sweep=request, **settings)
    overrides = (*Request.of(overrides, variants=variants).overrides, *([f"cfg.name={name}"] if name else []))
    launch_and_exit(AN_EXPERIMENT, overrides, resume=resume, origin=origin, **settings)


@click.command("launch", context_settings=commands.OVERRIDES)
@commands.resume_option
@launch_options
def data_launch(resume: bool, overrides: tuple[str, ...], **settings: Any) -> None:
    """Run the data job on a Ray cluster, detached. OVERRIDES are Hydra's: cfg.start_workers=64"""
    overrides += ("cfg.resume=true",) * resume
    _refuse_elsewhere(overrides, settings["ray_address"])
    launch_and_exit(DATA_JOB, overrides, **settings)


def refuse_unknown(words: Sequence[str]) -> None:
    """Raise UsageError for an option that a launch lacks. The words are those after `mlx`."""
    command = data_launch if words[0] == "data" else train_launch
    typed = command.make_context("launch", [*words[2:]]).params
    rest = typed["overrides"]
    if typed.get("many"):
        sweep = companions.part("sweeps.commands").train_sweep
        rest = sweep.make_context("launch --sweep", [*rest]).params["overrides"]
    if typed.get("place") is None:
        refuse_options(rest, f"mlx {words[0]} launch")


def typed_storage(overrides: Sequence[str]) -> str:
    """Return the path in the last `cfg.storage_path=` of overrides, empty without one."""
    typed = [item for item in overrides if item.lstrip("+").startswith("cfg.storage_path=")]
    return typed[-1].partition("=")[2].strip("'\"") if typed else ""


def _refuse_elsewhere(overrides: Sequence[str], ray_address: str | None) -> None:
    """Raise ElsewhereError if only the cluster has the storage: then the command runs there."""
    path = lookup.storage_path(typed_storage(overrides)) or ""
    with environment({"RAY_ADDRESS": ray_address} if ray_address else {}, replace=True):
        lookup.refuse_elsewhere(path)


@click.command("ray")
@options.address
def xp_ray(ray_address: str | None) -> None:
    """Print the URL of a cluster's dashboard, and open it if there is a display."""
    import webbrowser

    from mlx_runtime.companions.ray.addresses import Address
    from mlx_runtime.companions.ray.dashboard import Dashboard

    url = Dashboard.connect(Address.parse(ray_address)).address.url
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        webbrowser.open(url)
    say(url)
