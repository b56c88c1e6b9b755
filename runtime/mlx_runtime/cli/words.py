"""Words that several commands share: the address of a cluster, names that a shell completes, and what they print."""

import contextlib
import unicodedata
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from mlx_runtime.errors import plain

address_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--ray-address",
    "--address",
    "ray_address",
    metavar="URL",
    help="Dashboard of the cluster, like http://head:8265. Else RAY_ADDRESS.",
)


def say(text: object, *, err: bool = False) -> None:
    """Print a line with names or numbers from the storage, which others may have written."""
    click.echo(plain(str(text), one_line=True), err=err)


def agree(question: str) -> None:
    """Ask about such names, and end the command unless the answer is yes."""
    click.confirm(plain(question, one_line=True), abort=True)


class Word(click.ParamType[Any]):
    """Text without control characters, which nothing here is named with."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and any(unicodedata.category(letter) == "Cc" for letter in value):
            self.fail(f"{value!a} holds a control character", param, ctx)
        return value


WORD = Word()


def experiments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of experiments in the storage that begin so."""
    with contextlib.suppress(Exception):  # a shell has no place for errors
        from mlx_runtime import layout, xp

        names = sorted({run.experiment for run in layout.list_runs(xp.storage())})
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return []


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs of the experiment that was typed before which begin so."""
    with contextlib.suppress(Exception):
        from mlx_runtime import layout, xp

        names = [run.name for run in layout.list_runs(xp.storage(), context.params["name"])]
        return [CompletionItem(name) for name in ["latest", *reversed(names)] if name.startswith(incomplete)]
    return []
