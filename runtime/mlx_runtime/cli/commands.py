"""Commands that experiments and data jobs have in common: new, bind, launch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import Function
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, Kind, main_class
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.companions.ray.launch import Launch, SubmittedJob
    from mlx_runtime.training.request import RunConfig

OVERRIDES = {"ignore_unknown_options": True}
"""Context settings of commands that take overrides, some of which begin with a dash."""


def new_command(kind: Kind) -> click.Command:
    """Build `new NAME`."""

    @click.command("new", help=f"Create a new {kind.title} in the folder NAME.")
    @click.argument("name")
    @options.output
    def new(name: str, output: str) -> None:
        folder = projects.new(kind, name, Path(output))
        click.echo(f"created {folder}; next: cd {folder} && make run")

    return new


def bind_command(kind: Kind) -> click.Command:
    """Build `bind`."""

    @click.command("bind", help="Write or update src/conf.yaml from the constructors' defaults. Your edits stay.")
    @click.option("--check", is_flag=True, help="Write nothing; exit 1 if the file is not up to date.")
    @click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
    @options.debug
    def bind(check: bool, diff: bool) -> None:
        for line in projects.bind(kind, check=check, diff=diff):
            click.echo(line)

    return bind


def launch_options(function: Function) -> Function:
    """Add the options of `launch_and_exit`, and the argument OVERRIDES."""
    for decorator in (
        click.argument("overrides", nargs=-1),
        options.verbosity,
        click.option("--pip", is_flag=True, help="Let the cluster install the packages of requirements.txt."),
        click.option("-f", "--follow", is_flag=True, help="Show what the job prints, and exit with its exit code."),
        click.option("--check", is_flag=True, help="Only check whether it can run there."),
        options.address,
    ):
        function = decorator(function)
    return function


def launch_and_exit(
    kind: Kind,
    overrides: Sequence[str],
    *,
    sweep: "tuple[Sequence[str], Mapping[str, Any], Mapping[str, Any]] | None" = None,
    ray_address: str | None,
    check: bool,
    follow: bool,
    pip: bool,
) -> None:
    """Run the experiment or data job in the working directory on a cluster, and exit.

    Overrides of an experiment may contain options such as `--resume=RUN`. `sweep` holds the arguments of
    `projects.sweep`. The exit code is the job's with `follow`, 130 after Ctrl-C, and 0 otherwise.
    """
    try:
        folder = kind.folder()
        projects.refuse_options(kind, overrides, "launch")
        from mlx_runtime.companions.ray.addresses import Address
        from mlx_runtime.companions.ray.launch import Launch, prepare

        load: Callable[[], RunConfig] = partial(load_config, kind, folder, overrides, look=check)
        submit: Callable[[Launch], SubmittedJob] = Launch.submit_data_job
        if kind == AN_EXPERIMENT:
            submit = Launch.submit_run
        if sweep is not None:
            load, submit = sweep_launch(kind, folder, *sweep, look=check)
        prepared = prepare(folder, Address.parse(ray_address), load, pip=pip, show_all=check)
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
                if not quiet:
                    print(f"status    {status}")
    except KeyboardInterrupt:
        click.echo("\nif the job was submitted, it keeps running", err=True)
        code = 130
    sys.exit(code)


def sweep_launch(
    kind: Kind,
    folder: Path,
    overrides: Sequence[str],
    definition: Mapping[str, Any],
    how: Mapping[str, Any],
    *,
    look: bool,
) -> "tuple[Callable[[], RunConfig], Callable[[Launch], SubmittedJob]]":
    """Return what loads and checks the config of a sweep, binding it first if necessary, and what submits it."""
    from mlx_runtime.companions.sweeps.definition import Definition
    from mlx_runtime.companions.sweeps.launching import SweepLaunch

    def experiment() -> type:
        projects.bind_first(kind, folder)
        return main_class(kind, folder)

    launch = SweepLaunch(Definition(tuple(overrides), **definition), **how)
    return partial(launch.load, experiment, look=look), launch.submit


def load_config(kind: Kind, folder: Path, overrides: Sequence[str], *, look: bool = False) -> "RunConfig":
    """Load and check the config, binding it first if necessary. With `look`, run no code that conf.yaml names.

    Refuses a run that is in use, and a data job whose output is in use or exists.
    """
    projects.bind_first(kind, folder)
    main = main_class(kind, folder)
    from mlx_runtime.training.request import load_config

    config = load_config(main, overrides, look=look)
    if kind != AN_EXPERIMENT:
        from mlx_runtime.companions.ray.datajob import refuse_present

        refuse_present(config)
    return config
