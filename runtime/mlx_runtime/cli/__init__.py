"""The command `mlx`: parse, call one verb, print."""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mlx_runtime import __version__, companions
from mlx_runtime.errors import ElsewhereError, MissingLibraryError, UsageError, printable
from mlx_runtime.exits import clean_exit
from mlx_runtime.importing import exit_quickly

__all__ = ["commands", "main", "options"]

GROUPS = {
    "data": "Fill, inspect and clean up the storage.",
    "serve": "Answer requests with trained models.",
    "train": "Create, bind and run an experiment.",
    "xp": "List, inspect and stop runs.",
}


class LazyGroup(click.Group):
    """A group that imports the module of a command on use, so that `mlx --help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*GROUPS, *self.commands])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return _group(name) if name in GROUPS else self.commands.get(name)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        with clean_exit(), _one_line():
            return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        with clean_exit(), _one_line():
            try:
                return super().invoke(context)
            except ElsewhereError as error:  # the words are those that `resolve_command` has kept
                remote = companions.part("ray.remote")
                if not remote.runs_there(context.obj):
                    raise
                note = f"storage   {error.path} on {error.url}, as this machine lacks it"
                click.echo(printable(note, one_line=True), err=True)
                sys.exit(remote.run(context.obj, error.url))

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if (url := context.params.get("on")) is not None:
            return (
                "on",
                click.Command("on", callback=lambda: sys.exit(companions.part("ray.remote").run(args, url))),
                [],
            )
        context.obj = [*args]
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            own = {name: command.get_short_help_str(limit=1000) for name, command in self.commands.items()}
            formatter.write_dl(sorted((GROUPS | own).items()))


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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx")
@click.option("--on", metavar="URL", help="Run the command on this cluster, whose storage this machine lacks.")
def mlx(on: str | None) -> None:  # `resolve_command` reads it
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


def main() -> None:
    """Run the command line."""
    if sys.stdout is None or sys.stderr is None:  # files that are opened later would take their descriptors
        sys.exit("error: standard output or standard error is closed; redirect it to /dev/null instead")
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
