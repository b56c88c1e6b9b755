"""`mlx data`."""

import click

from mlx_runtime import data
from mlx_runtime.errors import UsageError, clean_exit


@click.group("data")
def group() -> None:
    """Look after what runs read."""


@group.command()
@click.option("--prepared", is_flag=True, help="Prepared sets, except those that a run is reading.")
@click.option(
    "--older-than", metavar="DAYS", type=click.FloatRange(min=0), help="Only those that were not used for so long."
)
@click.option(
    "--larger-than",
    metavar="GB",
    type=click.FloatRange(min=0),
    help="Only the longest unused, until the rest is smaller.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(prepared: bool, older_than: float | None, larger_than: float | None, yes: bool) -> None:
    """Remove prepared sets. Later runs read the datasets themselves, or prepare them again."""
    with clean_exit():
        if not prepared:
            raise UsageError("remove what? Prepared sets: mlx data rm --prepared")
        store = data.prepared_store()
        limited = older_than is not None or larger_than is not None
        endless = float("inf") if limited else -1.0
        days = endless if older_than is None else older_than
        gigabytes = endless if larger_than is None else larger_than
        sets = data.unwanted_prepared(store, days, gigabytes)
        if not sets:
            click.echo(f"nothing to remove in {store.root}")
            return
        for item in sets:
            rows = f"{item.manifest.rows:,} rows" if item.manifest else "incomplete"
            click.echo(
                f"{item.name}  {rows}  {item.size_bytes / 1e6:,.1f} MB  unused for {item.age_s / 86_400:.1f} days"
            )
        size = sum(item.size_bytes for item in sets) / 1e6
        if not yes:
            click.confirm(f"remove {len(sets)} of {store.root}, {size:,.1f} MB?", abort=True)
        gone = data.remove_prepared(store, sets)
        click.echo(f"removed {len(gone)}, {sum(item.size_bytes for item in gone) / 1e6:,.1f} MB")
