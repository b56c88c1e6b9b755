"""The command `mlx`: parse, call one verb, print."""

import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from mlx_runtime import __version__
from mlx_runtime.importing import exit_quickly

GROUPS = {
    "data": "Fill the storage, look at it, and clean it up.",
    "train": "Make, bind and run an experiment.",
    "xp": "Look at runs, and end them.",
}

PRINTING = {"best", "completion", "diff", "doctor", "logs", "ls", "show"}
"""Commands that are of no use without a standard output."""


class LazyGroup(click.Group):
    """Imports a command's module when it is used, so that `mlx --help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*GROUPS, *self.commands])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in GROUPS:
            module: Any = importlib.import_module(f"mlx_runtime.cli.{name}")
            command: click.Command = module.group
            return command
        return self.commands.get(name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            own = {name: command.get_short_help_str() for name, command in self.commands.items()}
            formatter.write_dl(sorted((GROUPS | own).items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx")
def mlx() -> None:
    """PyTorch experiments, trained on this machine or on a Ray cluster."""


@mlx.command("new")
@click.argument("name")
@click.option("-o", "--output", type=click.Path(file_okay=False), default=".", help="Folder to make it in.")
@click.pass_context
def new(context: click.Context, name: str, output: str) -> None:
    """Make a new experiment (the same as `mlx train new`)."""
    from mlx_runtime.cli import train

    context.invoke(train.new, name=name, output=output)


@mlx.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(as_json: bool) -> None:
    """Look whether this machine is ready."""
    from mlx_runtime import preflight
    from mlx_runtime.errors import clean_exit

    failed, found = 0, []
    with clean_exit():
        for check in preflight.doctor():
            failed += not check.ok
            found.append(vars(check))
            if not as_json:
                click.echo(check.line())
    if as_json:
        click.echo(json.dumps(found, indent=2))
    sys.exit(1 if failed else 0)


@mlx.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands, experiments and runs in a SHELL: eval "$(mlx completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(mlx, {}, "mlx", "_MLX_COMPLETE").source())


def main() -> None:
    from mlx_runtime.errors import UsageError, clean_exit

    blind = sys.stdout is None and not PRINTING.isdisjoint(sys.argv[1:3])
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # closed by who started this; other files must not take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # in a pipe, too, lines come when they are said; what a terminal cannot show is no reason to fail
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    exit_quickly()
    with clean_exit(debug="--debug" in sys.argv):  # what a command with this option lets through
        if blind:
            raise UsageError("standard output is closed, and printing is all that this command does")
        try:
            Path.cwd()
        except OSError as error:
            raise UsageError("the working directory no longer exists; change into another one") from error
        mlx(prog_name="mlx")
