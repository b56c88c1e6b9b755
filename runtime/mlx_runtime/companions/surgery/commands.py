"""The commands that prove experiments, upgrade projects, and inspect and rewrite weights."""

import contextlib
import random
import sys
from pathlib import Path

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.options import PAGE, confirm, say, word
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, DATA_JOB, Kind
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import MlxError, UsageError, printable
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.tables import print_table
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import to_json

OUTCOMES = {True: "holds", False: "FAILS", None: "skipped"}


@click.command("prove", context_settings=commands.OVERRIDES)
@click.option("--seed", type=click.IntRange(min=0), help="Seed for the times of the kills. Default: random.")
@click.option("--kills", metavar="N", type=click.IntRange(min=1), default=3, show_default=True, help="Number of kills.")
@options.json
@options.verbosity
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_prove(
    seed: int | None, kills: int, as_json: bool, variants: tuple[str, ...], overrides: tuple[str, ...]
) -> None:
    """Prove that runs resume exactly, and that 2 workers train like 1. Exit with 1 if a check fails.

    Short runs in a temporary folder are compared: uninterrupted twice, killed and resumed, and with 2 workers and 1.
    """
    request = Request.of(overrides, variants=variants)
    seed = random.randrange(10_000) if seed is None else seed
    with contextlib.redirect_stdout(sys.stderr), projects.stopped_early("during the proof"):
        _, experiment = projects.load(AN_EXPERIMENT, request.overrides, "prove")
        from mlx_runtime.companions.surgery import proving

        report = str if Settings.read().quiet else say
        checks, folder = proving.Prover(experiment, request, seed=seed, kills=kills, say=report).prove()
    outcomes = [check.holds for check in checks]
    holds = False if False in outcomes else all(outcomes) or None  # None: no check has failed, but one was skipped
    badge = proving.BADGE if holds else ""
    if as_json:
        told = [{**vars(check), "by_design": proving.BY_DESIGN[check.name]} for check in checks]
        click.echo(to_json({"holds": holds, "seed": seed, "checks": told, "folder": folder, "badge": badge}), nl=False)
    else:
        for check in checks:
            say(f"{OUTCOMES[check.holds]:<9} {check.name}: {check.text}")
            for title, items in (("cause", check.causes), ("design", proving.BY_DESIGN[check.name])):
                for item in items:
                    say(f"  {title:<7} {item}")
        say(f"runs      {folder or 'removed, since no check has failed'}")
        say(f"badge     {badge or 'none, because not every check holds'}")
    sys.exit(holds is False)


@click.command("surgery")
@click.argument("source", type=word, metavar="RUN")
@click.argument("other", type=word, required=False)
@options.json
@click.option("--rules", type=PAGE, help="YAML file with rules map and drop, for --to.")
@click.option("--to", "output", type=PAGE, metavar="NAME.safetensors", help="Write RUN's tensors, as the rules say.")
def xp_surgery(source: str, other: str | None, as_json: bool, rules: Path | None, output: Path | None) -> None:
    """List the tensors of RUN and, with OTHER, what changed from RUN to OTHER.

    RUN and OTHER are run_003, digits/run_003@best, a checkpoint, a file of weights, or a repository like
    hf://user/name. With --to, write RUN's tensors, renamed and dropped by rules, to a file that new runs start from.
    """
    if (rules is None) != (output is None) or (rules and other):
        raise UsageError(
            "to write tensors changed by rules, pass --rules FILE.yaml and --to NAME.safetensors, without OTHER"
        )
    from mlx_runtime.companions.surgery import inspection, sources

    one = sources.find(source, lookup.resolve_run)
    two = sources.find(other, lookup.resolve_run) if other is not None else None
    if rules is not None and output is not None:
        with projects.stopped_early("before the file was complete"):
            say(inspection.write(one, rules, output))
        return
    rows = inspection.tensor_rows(sources.read(one), None if two is None else sources.read(two))
    if as_json:
        click.echo(to_json(rows), nl=False)
    else:
        print_table([inspection.cells(row) for row in rows], sys.stdout, whole=True)


def upgrade_command(kind: Kind) -> click.Command:
    """Build `upgrade`."""

    @click.command("upgrade", help=f"Merge changes of the template into the files of this {kind.title}.")
    @click.option("--dry-run", is_flag=True, help="Print the changes, and write nothing.")
    @options.yes
    @options.debug
    def upgrade(dry_run: bool, yes: bool) -> None:
        from mlx_runtime.companions.surgery import upgrading

        with projects.stopped_early("before anything was changed"):
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
