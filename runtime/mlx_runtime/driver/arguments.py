"""The command line of a run: its options, and the request that they make, for `mlx train run`, main.py and Python."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import names_run, refuse_empty

OPTIONS: tuple[click.Parameter, ...] = (
    click.Option(["--fast-dev-run", "fast"], is_flag=True, help="Check in seconds that the code runs; keep nothing."),
    click.Option(["--overfit"], metavar="N", type=click.IntRange(1), help="Train on the same first N batches only."),
    click.Option(["--prepare-batches", "make"], is_flag=True, help="Prepare the datasets first, if needed."),
    click.Option(["--no-prepared", "never"], is_flag=True, help="Read samples, even of prepared datasets."),
    click.Option(
        ["--resume"],
        metavar="[RUN]",
        is_flag=False,
        flag_value="latest",
        help="Resume RUN, or the latest run; auto: the latest if there is one, otherwise a new run.",
    ),
    click.Option(
        ["--from", "origin"],
        metavar="RUN[@CHECKPOINT]",
        help="Start a new run with the config of another, and from a checkpoint of it: latest, best or epoch_0004.",
    ),
    click.Option(["--variant", "variants"], multiple=True, metavar="NAME", help="Apply src/variants/NAME.yaml."),
    click.Option(["--run", "claimed"], hidden=True),  # of jobs
    click.Option(["--eval", "checkpoint"], hidden=True),  # of `mlx train eval`
    click.Argument(["overrides"], nargs=-1),
)
"""Options of `mlx train run`, and of main.py."""

_NAMES = {"--resume": "resume", "--from": "origin", "--run": "claimed", "--eval": "checkpoint"}


@dataclass(frozen=True)
class Request:
    """A run or sweep to start, resume or evaluate. Runs are given by name, path or URI, or as `latest`."""

    overrides: tuple[str, ...] = ()  # Hydra's, and `--variant=NAME`
    resume: str | None = None  # run to resume; `auto` for the latest if there is one, otherwise a new run
    origin: str | None = None  # run whose conf.yaml a new run starts with, or whose checkpoint is evaluated
    claimed: str | None = None  # run to start in its claimed folder, or to resume if it has begun
    checkpoint: str | None = None  # path or URI of the checkpoint to evaluate
    fast: bool = False  # apply `FAST`, and keep nothing

    def __post_init__(self) -> None:
        refuse_empty({option: getattr(self, name) for option, name in _NAMES.items()})

    @classmethod
    def of(
        cls,
        overrides: Sequence[str] = (),
        *,
        resume: str | None = None,
        variants: Sequence[str] = (),
        overfit: int | None = None,
        make: bool = False,
        never: bool = False,
        **fields: Any,
    ) -> "Request":
        """Return the request of parsed options."""
        if make and (never or fields.get("fast")):
            other = "--no-prepared" if never else "--fast-dev-run"
            raise UsageError(f"--prepare-batches and {other} contradict each other; pass one of them")
        if resume and not names_run(resume):  # an override after --resume
            resume, overrides = "latest", (resume, *overrides)
        implied = {
            "cfg.preparation.mode=make": make,
            "cfg.preparation.mode=never": never,
            f"++cfg.debug.overfit_batches={overfit}": overfit,  # ++, because an older conf.yaml may lack it
        }
        chosen = [f"--variant={name}" for name in variants]
        given = [override for override, value in implied.items() if value]
        return cls((*chosen, *overrides, *given), resume=resume, **fields)

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Request":
        """Parse the options of `mlx train run`, and overrides."""
        command = click.Command("main.py", params=[*OPTIONS], add_help_option=False)
        try:
            typed = command.make_context("main.py", [*words], ignore_unknown_options=True).params
        except click.UsageError as error:
            raise UsageError(error.format_message()) from None
        refuse_options(typed["overrides"], "mlx train run")
        return cls.of(**typed)

    @property
    def words(self) -> list[str]:
        """Arguments of main.py."""
        options = [f"{option}={value}" for option, name in _NAMES.items() if (value := getattr(self, name))]
        return [*options, *["--fast-dev-run"] * self.fast, *self.overrides]

    def __iter__(self) -> Iterator[str]:
        """Iterate over these arguments, for a main.py that adds some: `[*overrides, "cfg.seed=1"]`."""
        return iter(self.words)


def refuse_options(overrides: Sequence[str], command: str) -> None:
    """Raise an error for words that look like options, but are none of the command."""
    for item in overrides:
        if item.startswith("-") and not item.startswith(("--from=", "--variant=")):  # those of a sweep
            cure = f"see: {command} --help; settings are overrides, like cfg.start_workers=2"
            raise UsageError(f"there is no option {item}; {cure}")
