"""Commands of the page, and the labels of runs that it shows."""

import os
from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs import records
from mlx_runtime.runs.queries import lookup
from mlx_runtime.storage.files import join_path, storage_at, storage_errors, to_json


@click.command("tag")
@options.name()
@options.run()
@click.option("--add", multiple=True, metavar="TAG", type=word, help="Add a tag.")
@click.option("--remove", multiple=True, metavar="TAG", type=word, help="Remove a tag.")
@click.option("--note", metavar="TEXT", help="Replace the note; an empty TEXT removes it.")
def xp_tag(name: str, run: str | None, add: tuple[str, ...], remove: tuple[str, ...], note: str | None) -> None:
    """Tag a RUN (run_003, 3 or latest) of NAME, or write a note about it, even while it trains.

    Prints its tags and its note. mlx xp ls --json and the page of mlx xp ui show them.
    """
    if run is None and "/" not in name:
        raise UsageError(f"which run? For the latest: mlx xp tag {name} latest")
    folder = lookup.resolve_run(name, run)
    labels = records.load_labels(folder)
    tags = [tag for tag in dict.fromkeys([*labels.get("tags", []), *add]) if tag not in remove]
    labels = labels | {"tags": tags} | ({} if note is None else {"note": note or None})
    if add or remove or note is not None:
        with storage_errors(f"cannot write {join_path(folder.location, records.LABELS)}"):
            storage_at(folder.location).write(to_json(labels).encode(), records.LABELS)
    say(f"{folder.title}: {', '.join(tags) or 'no tags'}{'; ' if labels.get('note') else ''}{labels.get('note') or ''}")


@click.command("ui")
@click.argument("storages", type=word, metavar="[STORAGE]...", nargs=-1)
@click.option("--edit", is_flag=True, help="Edit dashboard.py, the page of this experiment, in the browser.")
@click.option("--export", type=options.FOLDER, metavar="DIR", help="Write pages that work offline instead.")
@click.option("--run", "runs", multiple=True, metavar="RUN", type=word, help="With --export, only this run.")
@click.option("--host", default="127.0.0.1", show_default=True, type=word, help="Others need MLX_UI_TOKEN.")
@click.option("--port", type=click.IntRange(0, 65535), default=2718, show_default=True, help="0 means any free port.")
def xp_ui(
    storages: tuple[str, ...], edit: bool, export: str | None, runs: tuple[str, ...], host: str, port: int
) -> None:
    """Open a page about all runs of each STORAGE, by default that of the experiment in the working directory.

    The page is dashboard.py of the experiment, a marimo notebook, or the one of this package. Its URL has a token; with
    MLX_UI_TOKEN, it is yours.
    """
    token = os.environ.pop("MLX_UI_TOKEN", None)  # processes that the page starts do not get it
    require("marimo", "the page")  # first, because its extra brings all others
    from mlx_runtime.companions.ui import export as pages
    from mlx_runtime.companions.ui import server
    from mlx_runtime.companions.ui.tables import roots

    places = roots(storages or None)
    if export is not None:
        say(pages.write(places, runs, Path(export)))
        return
    if runs:
        raise UsageError("--run belongs to --export; choose runs in the page")
    server.serve(places, host=host, port=port, token=token, edit=edit)
