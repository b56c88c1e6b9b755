"""Commands and options shared by experiments and data jobs."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime import companions
from mlx_runtime.cli import options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, Kind, main_class
from mlx_runtime.driver.arguments import Request

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

OVERRIDES = {"ignore_unknown_options": True}
"""Context settings of commands with overrides, some of which begin with a dash."""

prepare_option = click.option("--prepare-batches", "make", is_flag=True, help="Prepare the datasets first, if needed.")
variant_option = click.option(
    "--variant", "variants", multiple=True, metavar="NAME", help="Apply src/variants/NAME.yaml to conf.yaml."
)
resume_option = click.option("--resume", is_flag=True, help="Keep the finished items of an interrupted job.")
from_option = click.option("--from", "origin", metavar="RUN[@CHECKPOINT]", help="Start a new run like another.")


class Group(click.Group):
    """A group of commands, including those of companions."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*self.commands, *companions.commands(self.name or "")])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        companion = companions.commands(self.name or "").get(name)
        if companion is None:
            return self.commands.get(name)
        added: click.Command = getattr(companions.part(f"{companion}.commands"), f"{self.name}_{name}")
        return added

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the first sentence of each command, whole: click cuts it at the end of the line."""
        commands = {name: self.get_command(context, name) for name in self.list_commands(context)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, item.get_short_help_str(limit=1000)) for name, item in commands.items() if item])


def new_command(kind: Kind) -> click.Command:
    """Build `new NAME`."""

    @click.command("new", help=f"Create a new {kind.title} in the folder NAME.")
    @click.argument("name")
    @options.output
    def new(name: str, output: str, variant: str = "") -> None:
        folder = projects.new(kind, name, Path(output), variant=variant)
        click.echo(f"created {folder}; next: cd {folder} && make run")

    for variant in kind.variants:
        text = f"Create one in {variant.upper()}."
        new.params.append(click.Option([f"--{variant}", "variant"], flag_value=variant, default="", help=text))
    return new


def bind_command(kind: Kind) -> click.Command:
    """Build `bind`."""

    @click.command("bind", help="Write or update src/conf.yaml from the constructors' defaults. Your edits are kept.")
    @click.option("--check", is_flag=True, help="Write nothing; exit 1 if the file is not up to date.")
    @options.debug
    def bind(check: bool) -> None:
        for line in projects.bind(kind, check=check):
            click.echo(line)

    return bind


def load_config(kind: Kind, folder: Path, overrides: Sequence[str], **fields: Any) -> "RunConfig":
    """Load and check the config, binding it first if necessary. Further fields are those of `Request`.

    Without torch, the code cannot be imported: only keys and the runtime's settings are checked, and the job checks the
    rest before it begins.
    """
    from mlx_runtime.driver.request import load_config

    request = Request(tuple(overrides), **fields)
    if find_spec("torch") is not None:
        projects.bind_first(kind, folder)
        return load_config(main_class(kind, folder), request)
    from mlx_runtime.config.constructors.targets import object_at

    name = "TrainConfig" if kind == AN_EXPERIMENT else "DataConfig"
    hints = {"cfg": object_at(f"mlx_runtime.{name}")}
    unseen = type("Unseen", (), {"__module__": "src", "__annotations__": hints, "CONFIG": name})
    return load_config(unseen, request, keys_only=True)
