"""Commands of the page, the labels of runs that it shows, and the drawing of an experiment."""

import os
from pathlib import Path

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import say, word
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import Request, refuse_options
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.runs import records
from mlx_runtime.runs.queries import lookup
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import join_path, storage_at, storage_errors, to_json
from mlx_runtime.storage.local import one_at_a_time

DRAW_S = 600.0
"""Time limit for building the models, with the beginning of the loop."""


@click.command("draw", context_settings=commands.OVERRIDES)
@options.debug
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=options.PAGE,
    default="model.md",
    show_default=True,
    help="A .md or .svg.",
)
@click.option(
    "--depth", metavar="N", type=click.IntRange(min=0), default=2, show_default=True, help="Levels of modules."
)
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_draw(output: Path, depth: int, variants: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Draw the experiment: the modules of its models with shapes and sizes, and its wiring.

    A .md file has a mermaid diagram and a table. worker_loop runs until it has called the models; nothing is trained.
    """
    from mlx_runtime.companions.ui import drawing

    words = Request.of(overrides, variants=variants).overrides
    refuse_options(words, "mlx train draw")
    write = {".md": drawing.to_markdown, ".svg": drawing.to_svg}.get(output.suffix)
    if write is None:
        raise UsageError(f"{output} is neither a .md nor a .svg file; write: mlx train draw -o model.md")
    folder = AN_EXPERIMENT.folder()
    projects.bind_first(AN_EXPERIMENT, folder)
    structure = drawing.structure_of(folder, words, DRAW_S)
    if not structure["models"]:
        raise UsageError("mlx train draw shows torch modules, and the models of this experiment are none")
    output.write_text(write(structure, depth), encoding="utf-8")
    say(f"wrote {output}")


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
    with one_at_a_time(Settings.read().cache / "locks", str(folder.path.resolve())):
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
    token = os.environ.pop("MLX_UI_TOKEN", None)  # no process that the page starts gets it
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
