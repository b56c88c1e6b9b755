"""Commands of the page, and the labels of runs that it shows."""

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word
from mlx_runtime.errors import UsageError
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
