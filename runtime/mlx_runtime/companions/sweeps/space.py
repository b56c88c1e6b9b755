"""The search space of a sweep: overrides in Hydra's sweep grammar.

`lr=1e-3,1e-4`, `choice(...)` and `range(...)` list values; `interval(...)`, `tag(log, interval(...))` and
`int(interval(...))` are intervals that include both ends.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx_runtime.config.composition import parse_overrides, raise_if
from mlx_runtime.config.projects import CONF
from mlx_runtime.driver.request import load_config
from mlx_runtime.errors import ConfigError, UsageError, short_message

Values = dict[str, str]
"""Values of a trial by key, as text: `f"{key}={text}"` is the override of a value."""

LARGE_GRID = 1000
"""Maximum number of trials in a grid without confirmation."""

MOST_VALUES = 100_000
"""Maximum number of values in one override."""

COMMON = (
    *("cfg.name", "cfg.storage_path", "cfg.monitor", "cfg.mode"),
    *("cfg.cross_validation.folds", "cfg.cross_validation.fold"),
    *("cfg.engine", "cfg.start_workers", "cfg.elastic.min_workers", "cfg.elastic.max_workers"),
    *("cfg.cpus_per_worker", "cfg.gpus_per_worker", "cfg.use_gpu"),
)
"""Settings that must be the same in all runs of a sweep."""


class Part(NamedTuple):
    """One of several runs of a trial, which differ in their seed, in the fold that they hold out, or in both."""

    seed: int | None = None  # None if all runs have the same
    fold: int | None = None  # from 0; None without folds

    @property
    def title(self) -> str:
        """Text like `seed 3 fold 1`, with folds counted from 1; empty for a trial as a whole."""
        return " ".join(
            f"{name} {value + (name == 'fold')}" for name, value in self._asdict().items() if value is not None
        )

    def overrides(self, folds: int | None) -> tuple[str, ...]:
        """Return the overrides of this run."""
        values = {"seed": self.seed, "cross_validation.folds": folds, "cross_validation.fold": self.fold}
        return tuple(f"++cfg.{key}={value}" for key, value in values.items() if value is not None)


WHOLE = Part()
"""A trial as a whole, which is also its only run without seeds and folds."""


def parts_of(seed: int, seeds: int | None, folds: int | None) -> list[Part]:
    """Return the runs of each trial, with all folds of the first seed first."""
    numbers = range(seed, seed + seeds) if seeds else [None]
    return list(itertools.starmap(Part, itertools.product(numbers, range(folds) if folds else [None])))


@dataclass(frozen=True)
class Dimension:
    """A key with different values: the `choices`, or values between `low` and `high`."""

    key: str  # as typed before the `=`, like `optimizers.adam.lr`
    text: str  # the override as typed
    choices: tuple[str, ...] = ()  # texts of the values; empty for an interval
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False

    @property
    def samples(self) -> tuple[str, ...]:
        """All choices, or the ends of the interval."""
        return self.choices or (self.format(self.low), self.format(self.high))

    def format(self, value: float) -> str:
        """Return a value of the interval as text, with four significant digits of itself or of the interval's width."""
        if self.integer:
            return str(int(value))
        digits = 3 - math.floor(math.log10(value if self.log else self.high - self.low))
        return repr(min(max(round(value, digits), self.low), self.high))


@dataclass(frozen=True)
class Space:
    """All overrides of a sweep, and the keys that vary."""

    typed: tuple[str, ...]  # the overrides, in order
    dimensions: tuple[Dimension, ...]

    @property
    def fixed(self) -> tuple[str, ...]:
        """Overrides and options, like `--from=RUN`, that apply to every trial."""
        swept = {dimension.text for dimension in self.dimensions}
        return tuple(text for text in self.typed if text not in swept)

    @property
    def size(self) -> int | None:
        """Number of points in the grid; None if there is an interval."""
        counts = [len(dimension.choices) for dimension in self.dimensions]
        return math.prod(counts) if all(counts) else None

    @property
    def first(self) -> Values:
        """The first value of each key that varies."""
        return {dimension.key: dimension.samples[0] for dimension in self.dimensions}

    def find_varying_key(self, *keys: str) -> str | None:
        """Return a varying key among or below these keys, or None."""
        names = [dimension.key.lstrip("+") for dimension in self.dimensions]
        return next((name for name in names if name.startswith(keys)), None)

    def grid(self) -> Iterator[Values]:
        """Yield each combination of choices; the last key changes fastest."""
        keys = [dimension.key for dimension in self.dimensions]
        for texts in itertools.product(*(dimension.choices for dimension in self.dimensions)):
            yield dict(zip(keys, texts, strict=True))

    def expand(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """Return the overrides of one trial in the order typed: one below a varying key applies after it."""
        keys = {dimension.text: dimension.key for dimension in self.dimensions}
        return tuple(f"{keys[text]}={values[keys[text]]}" if text in keys else text for text in self.typed)


def parse(overrides: Sequence[str]) -> Space:
    """Parse the overrides of a sweep. Words that begin with a dash are options, which apply to every trial.

    Raises:
        UsageError, ConfigError: an override is invalid, or cannot be swept; in one line.
    """
    dimensions, keys = [], Counter[str]()
    for text in overrides:
        if text.startswith("-"):
            continue
        (override,) = parse_overrides([text])
        keys[override.key_or_group] += 1
        if override.is_sweep_override():
            dimensions.append(_dimension(override, text))
    for dimension in dimensions:
        if keys[name := dimension.key.lstrip("+")] > 1:
            raise UsageError(f"{name} is given {keys[name]} times; give all its values in one override")
    return Space(tuple(overrides), tuple(dimensions))


def check(space: Space, experiment: type, path: Path = CONF, *, title: str = "") -> None:
    """Check every value, with the first values of all other keys; `title` as in `load_config`.

    Raises:
        ConfigError: values are invalid; one line per problem.
    """
    others = [space.first | {item.key: text} for item in space.dimensions for text in item.samples[1:]]
    problems: dict[str, None] = {}
    for values in [space.first, *others]:
        try:
            load_config(experiment, [*space.expand(values)], path, title=title or None)
        except ConfigError as error:
            for problem in error.problems or [str(error)]:
                for item in space.dimensions:  # an unknown key is only one problem
                    problem = problem.replace(f"override {item.key}={values[item.key]}:", f"override {item.text}:")
                problems[problem] = None
    raise_if([*problems], title or path)


def trial_count(space: Space, search: str, trials: int | None, *, large: bool = False) -> int:
    """Return the maximum number of trials of a search, given `--trials`; `large` is `--yes`.

    Raises:
        UsageError: the search would not end without `--trials`, a grid has an interval, or the grid is too large.
    """
    if space.size is None:
        interval = next(item.text for item in space.dimensions if not item.choices)
        if search == "grid":
            raise UsageError(f"--search grid needs lists of values; {interval} is an interval")
        if trials is None:
            raise UsageError(f"{interval} is an interval; pass the number of trials, like --trials 20")
        return trials
    count = min(trials or space.size, space.size)
    if count > LARGE_GRID and not large:
        raise UsageError(f"these are {count:,} trials; run fewer with --trials 100, or confirm them with --yes")
    return count


def _dimension(override: Any, text: str) -> Dimension:
    """Return the dimension of an override with several values; `override` is Hydra's object."""
    sweep, key = override.value(), override.get_key_element()
    if why := _refusal(override, sweep):
        raise UsageError(f"{text}: {why}")
    if override.is_interval_sweep():
        integer = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        return Dimension(key, text, low=sweep.start, high=sweep.end, log="log" in sweep.tags, integer=integer)
    try:
        choices = dict.fromkeys(itertools.islice(override.sweep_string_iterator(), MOST_VALUES + 1))
    except ArithmeticError as error:  # `range(1, 10, nan)`
        raise UsageError(f"{text}: {short_message(error)}; the ends and the step of a range are finite") from error
    if not 0 < len(choices) <= MOST_VALUES:
        raise UsageError(f"{text}: an override lists 1 to {MOST_VALUES:,} values")
    return Dimension(key, text, tuple(choices))


def _refusal(override: Any, sweep: Any) -> str:
    """Return the reason why an override cannot be swept, or an empty string."""
    interval = override.is_interval_sweep()
    if any(hasattr(value, "tags") for value in getattr(sweep, "list", None) or ()):
        return "a function like choice(...) stands alone, and a list holds only values: choice(a, b, c) or a,b,c"
    if override.is_delete():
        return "a key is deleted in all trials or in none"
    if override.key_or_group in COMMON:
        return f"{override.key_or_group} is the same for all runs of a sweep"
    if override.value_type.name == "GLOB_CHOICE_SWEEP":
        return "glob() is not supported; list the values"
    if sweep.tags - {"log"} or (sweep.tags and not interval):
        return "the only tag is log, of an interval: tag(log, interval(1e-5, 1e-1))"
    if interval and not (0 if sweep.tags else -math.inf) < sweep.start < sweep.end < math.inf:
        return "an interval begins below its end, a logarithmic one above 0, and both ends are finite"
    if not interval and sweep.shuffle:
        return "shuffle() is not supported; --search random runs a grid in random order"
    if override.is_range_sweep() and sweep.step == 0:
        return "the step of a range is not 0"
    return ""
