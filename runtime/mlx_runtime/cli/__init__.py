"""The command `mlx`: parse, call one verb, print."""

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mlx_runtime import __version__, companions
from mlx_runtime.errors import MissingLibraryError, UsageError, located
from mlx_runtime.exits import clean_exit
from mlx_runtime.importing import exit_quickly

__all__ = ["commands", "main", "options"]

GROUPS = {
    "data": "Fill, inspect and clean up the storage.",
    "serve": "Answer requests with trained models.",
    "train": "Create, bind and run an experiment.",
    "xp": "List, inspect and stop runs.",
}

ENTRY_POINTS = "mlx_runtime.commands"
"""The entry point group with the commands of other packages."""


class LazyGroup(click.Group):
    """A group that imports the module of a command on use, so that `mlx --help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*GROUPS, *self.commands, *_others()])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in GROUPS:
            return _group(name)
        if name not in self.commands and (other := _others().get(name)) is not None:
            return _load(other)
        return self.commands.get(name)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(context, name := args[0]) is None and not context.resilient_parsing:
            found = [title for title in sorted(GROUPS, reverse=True) if name in _group(title).list_commands(context)]
            if found:
                context.fail(f"No such command {name!r}. Did you mean {' or '.join(f'mlx {x} {name}' for x in found)}?")
        return super().resolve_command(context, args)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        with clean_exit(), _one_line():
            return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        with clean_exit(), _one_line():
            return super().invoke(context)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            own = {name: command.get_short_help_str(limit=1000) for name, command in self.commands.items()}
            others = {name: f"From the package {item.dist.name}." for name, item in _others().items()}
            formatter.write_dl(sorted((others | GROUPS | own).items()))


def _group(name: str) -> click.Group:
    if name in ("data", "serve"):  # all of their commands are those of companions
        from mlx_runtime.cli import commands

        return commands.Group(name, help=GROUPS[name])
    module: Any = importlib.import_module(f"mlx_runtime.cli.{name}")
    group: click.Group = module.group
    return group


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Convert usage errors of click to ours, which are printed in one line."""
    try:
        yield
    except click.UsageError as error:
        text = error.format_message().removesuffix(".")
        if error.ctx is None or "\n" in text:  # the help of a group that lacks its command
            raise
        raise UsageError(f"{text}{'' if text.endswith('?') else ';'} see: {error.ctx.command_path} --help") from error
    except ModuleNotFoundError as error:
        from mlx_runtime.extras import cure

        if (advice := cure(error)) is None:
            raise
        raise MissingLibraryError(f"this needs {error.name}, which is not installed; {advice}") from error


def _others() -> dict[str, Any]:
    """Return the entry points of other packages' commands by name; empty in most installations."""
    files = (file for folder in sys.path for file in Path(folder).glob("*-info/entry_points.txt"))
    if not any(ENTRY_POINTS in file.read_text() for file in files):
        return {}
    from importlib.metadata import entry_points  # here, because it takes as long as importing click

    return {item.name: item for item in entry_points(group=ENTRY_POINTS)}


def _load(entry_point: Any) -> click.Command:
    """Import the command of another package; UsageError if that fails."""
    title = f"the command {entry_point.name} of the package {entry_point.dist.name}"
    try:
        command = entry_point.load()
    except Exception as error:
        raise UsageError(f"{title} cannot be imported from {entry_point.value}: {located(error)}") from error
    if not isinstance(command, click.Command):
        raise UsageError(f"{title} is {entry_point.value}, which is not a command of click")
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx")
def mlx() -> None:
    """PyTorch experiments, trained on this machine or on a Ray cluster."""


@mlx.command("new")
@click.argument("name")
@click.option("-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to create it in.")
@click.pass_context
def new(context: click.Context, name: str, output: str) -> None:
    """Create a new experiment (same as `mlx train new`)."""
    from mlx_runtime.cli import train

    context.invoke(train.group.commands["new"], name=name, output=output)


@mlx.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Check this machine and the experiment in the working directory."""
    checks = []
    for check in companions.part("ray.doctor").checks():
        checks.append(check)
        if not as_json:
            click.echo(check.line())
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks], indent=2))
    sys.exit(0 if all(check.ok for check in checks) else 1)


@mlx.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL: eval "$(mlx completion bash)"."""
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(mlx, {}, "mlx", "_MLX_COMPLETE").source())


def main() -> None:
    """Run the command line, even if standard streams are closed or the working directory was removed."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Pipes receive each line immediately, and characters that the encoding lacks are escaped.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    exit_quickly()
    with clean_exit():
        try:
            Path.cwd()
        except OSError as error:
            raise UsageError("the working directory no longer exists; change to another one") from error
        mlx(prog_name="mlx")


def _open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null, so that no other file takes their descriptors."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
