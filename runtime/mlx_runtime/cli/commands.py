"""Commands that experiments and data jobs have in common: new, bind, launch."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli.options import Function, address_option, command, debug_option, output_option, verbosity_options
from mlx_runtime.cli.verbs import binding, generation, running
from mlx_runtime.config.projects import AN_EXPERIMENT, Kind, main_class
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.cluster.launch import Launch, SubmittedJob
    from mlx_runtime.training.request import RunConfig

OVERRIDES = {"ignore_unknown_options": True}
"""Context settings of commands that take overrides, some of which begin with a dash."""

Submission = tuple["SubmittedJob", dict[str, str], Callable[[], bool]]
"""A job, what to print about it by title, and a function that returns True once the job is at work."""


def new_command(kind: Kind) -> click.Command:
    """Build `new NAME`."""

    @click.command("new", help=f"Create a new {kind.title} in the folder NAME.")
    @click.argument("name")
    @output_option
    def new(name: str, output: str) -> None:
        with command():
            folder = generation.new(kind, name, Path(output))
        click.echo(f"created {folder}; next: cd {folder} && make run")

    return new


def bind_command(kind: Kind) -> click.Command:
    """Build `bind`."""

    @click.command("bind", help="Write or update src/conf.yaml from the constructors' defaults. Your edits stay.")
    @click.option("--check", is_flag=True, help="Write nothing; exit 1 if the file is not up to date.")
    @click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
    @debug_option
    def bind(check: bool, diff: bool, debug: bool) -> None:
        with command(debug=debug):
            for line in binding.bind(kind, check=check, diff=diff):
                click.echo(line)

    return bind


def launch_options(function: Function) -> Function:
    """Add the options of `launch`, which `launch_and_exit` takes, and the argument OVERRIDES."""
    for decorator in (
        click.argument("overrides", nargs=-1),
        verbosity_options,
        click.option("--pip", is_flag=True, help="Let the cluster install the packages of requirements.txt."),
        click.option("-f", "--follow", is_flag=True, help="Show what the job prints, and exit with its exit code."),
        click.option("--check", is_flag=True, help="Only check whether it can run there."),
        address_option,
    ):
        function = decorator(function)
    return function


def launch_and_exit(
    kind: Kind, overrides: Sequence[str], *, quiet: bool, verbose: bool, debug: bool, **options: Any
) -> None:
    """Launch the experiment or data job in the working directory, and exit with the code of the launch."""
    with command(quiet=quiet, verbose=verbose, debug=debug):
        try:
            code = launch(kind, overrides, **options)
        except KeyboardInterrupt:
            click.echo("\nif the job was submitted, it keeps running", err=True)
            code = 130
    sys.exit(code)


def launch(
    kind: Kind,
    overrides: Sequence[str],
    *,
    ray_address: str | None = None,
    check: bool = False,
    follow: bool = False,
    pip: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Run the experiment or data job in the working directory on a cluster.

    Args:
        kind: kind of project in the working directory.
        overrides: Hydra overrides; for an experiment also options such as `--resume=RUN`.
        ray_address: address of the cluster; by default `RAY_ADDRESS`. See `addresses.Address`.
        check: only check whether it can run there, and print every result.
        follow: print what the job prints until it ends.
        pip: the cluster installs the packages of requirements.txt.
        say: receives lines for the user.

    Returns:
        The exit code: that of the job with `follow`, else 0.

    Raises:
        UsageError: the working directory is not of this kind, or there is no address.
        ClusterError: a check failed, or the job failed during startup.
    """
    folder = kind.folder()
    running.refuse_options(kind, overrides, "launch")
    from mlx_runtime.cluster.addresses import Address
    from mlx_runtime.cluster.launch import prepare

    load = partial(load_config, kind, folder, overrides, look=check)
    prepared = prepare(folder, Address.parse(ray_address), load, pip=pip, show_all=check, say=say)
    if check:
        return 0
    submit = _submit_run if kind == AN_EXPERIMENT else _submit_data_job
    job, facts, has_begun = submit(prepared, overrides)
    quiet = Settings.read().quiet
    for title, text in facts.items():
        if title == "folder" or not quiet:
            say(f"{title:<9} {text}")
    if follow:
        return job.follow()
    state = job.wait(has_begun)
    if not quiet:
        say(f"status    {state.status if state.ended or has_begun() else 'PENDING'}")
    return 0


def load_config(kind: Kind, folder: Path, overrides: Sequence[str], *, look: bool = False) -> "RunConfig":
    """Load and check the config, binding it first if necessary.

    Args:
        kind: kind of project in the folder.
        folder: the working directory.
        overrides: overrides as typed.
        look: run no code that conf.yaml names.

    Raises:
        UsageError: a run or the output of a data job is in use or exists.
        ConfigError: the config is invalid; the message has one line per problem.
    """
    running.bind_first(kind, folder)
    main = main_class(kind, folder)
    from mlx_runtime.training.request import load_config

    config = load_config(main, overrides, look=look)
    if kind != AN_EXPERIMENT:
        from mlx_runtime.cluster.datajob import refuse_present

        refuse_present(config)
    return config


def _submit_run(launch: "Launch", overrides: Sequence[str]) -> Submission:
    from mlx_runtime.runs import records

    run, job = launch.submit_run()
    elsewhere = Settings.read().storage or any("cfg.storage_path" in item for item in launch.config.overrides)
    words = shlex.join([run.location] if elsewhere else [run.experiment, run.name])
    facts = {"run": f"{run.experiment} {run.name}", "folder": run.location, "job": job.id, "dashboard": job.page}
    facts |= {"follow": f"mlx xp logs {words}", "look": f"mlx xp board {words}", "stop": f"mlx xp stop {words}"}
    return job, facts, lambda: records.recorded(run).get("status") != "PENDING"


def _submit_data_job(launch: "Launch", overrides: Sequence[str]) -> Submission:
    from mlx_runtime.cluster.datajob import output_path
    from mlx_runtime.config.composition import storage_override
    from mlx_runtime.runs.filling import being_filled
    from mlx_runtime.storage.files import storage_root

    cfg, url = launch.config.cfg, launch.dashboard.address.url
    path, job = output_path(cfg), launch.dashboard.unused_id(f"data-{cfg.name}")
    arguments = [*overrides, storage_override(storage_root(cfg.storage_path))]
    submitted = launch.submit(job, arguments, {"mlx": "data", "name": cfg.name, "folder": path})
    facts = {"job": job, "folder": path, "dashboard": submitted.page}
    facts |= {
        "follow": f"RAY_ADDRESS={url} ray job logs --follow {job}",
        "stop": f"RAY_ADDRESS={url} ray job stop {job}",
    }
    return submitted, facts, lambda: being_filled(path)
