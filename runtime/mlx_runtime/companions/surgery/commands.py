"""The commands that upgrade projects."""

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import confirm, say
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, DATA_JOB, Kind
from mlx_runtime.errors import MlxError, UsageError, printable


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
        if dry_run:
            return
        if found.needed:
            if not yes:
                confirm("upgrade?", "nothing was changed")
                if upgrading.plan(kind) != found:
                    raise UsageError(
                        "the project has changed in the meantime; nothing was changed; run the command again"
                    )
            say(f"undo with: {found.undo}")
            found.apply()
        if found.conflicts:
            raise MlxError(
                f"resolve the conflicts in {', '.join(found.conflicts)}, then type: {kind.command} bind && make test"
            )
        if found.binds:
            for line in projects.bind(kind, check=not found.needed):  # an earlier upgrade may have failed to
                say(line)
        elif (found.folder / CONF).exists():
            say(f"bind with: {kind.command} bind")
        if found.needed:
            say("test with: make test")

    return upgrade


train_upgrade = upgrade_command(AN_EXPERIMENT)
data_upgrade = upgrade_command(DATA_JOB)
