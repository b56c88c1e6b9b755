"""The commands that upgrade projects."""

from importlib.util import find_spec

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import confirm, say
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, DATA_JOB, Kind
from mlx_runtime.errors import MlxError, printable


def upgrade_command(kind: Kind) -> click.Command:
    """Build `upgrade`."""

    @click.command("upgrade", help=f"Merge what is new in the template of this {kind.title} into its files.")
    @click.option("--dry-run", is_flag=True, help="Print the changes, and write nothing.")
    @options.yes
    @options.debug
    def upgrade(dry_run: bool, yes: bool) -> None:
        from mlx_runtime.companions.surgery import upgrading

        found = upgrading.plan(kind)
        click.echo(printable(found.diff()), nl=False)
        for line in found.lines():
            say(line)
        if dry_run or not found.needed:
            return
        if not yes:
            confirm("upgrade?", "nothing was changed")
        found.apply()
        say(f"undo with: {upgrading.UNDO}")
        if (found.folder / CONF).exists() and find_spec("torch") is not None:  # a client cannot import the code
            for line in projects.bind(kind):
                say(line)
        if found.conflicts:
            raise MlxError(f"resolve the conflicts in {', '.join(found.conflicts)}, then type: make test")
        say("test with: make test")

    return upgrade


train_upgrade = upgrade_command(AN_EXPERIMENT)
data_upgrade = upgrade_command(DATA_JOB)
