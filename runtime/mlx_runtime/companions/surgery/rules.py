"""Rules by which the tensors of a model get their values: from which tensor of a source, and how shapes are fitted.

Nothing here reads a tensor: names and shapes are enough to see whether the rules fit.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_runtime.config.building import build
from mlx_runtime.config.checks import problems_of
from mlx_runtime.config.composition import raise_if
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.errors import ConfigError, UsageError, suggest
from mlx_runtime.sections import Transfer

KEY = "cfg.transfer"


def problems(cfg: Any) -> list[str]:
    """Return one line per problem of `cfg.transfer`."""
    return [text for name, given in cfg.transfer.items() for text in _problems_of(given, f"{KEY}.{name}")]


def _problems_of(given: Any, key: str) -> list[str]:
    if not isinstance(given, Transfer):
        return [f"{key} is {given!r:.100}, not settings of {path_of(Transfer)}"]
    found = [
        f"{key}: {item} has more * in the new name than in the pattern"
        for item in patterns(given, "map")
        if str(item.value).count("*") > item.text.count("*")
    ]
    if not (given.source and all(rule and all(rule.values()) for rule in given.rules)):
        found.append(f"{key}: the source, or one of the rules, is empty")
    return found


def parse(node: Mapping[str, Any], title: object) -> Transfer:
    """Return the transfer that a node of a file describes. Raises ConfigError, with this title."""
    key = f"{KEY}.*"  # of any model
    tree = {key: {"_target_": path_of(Transfer), **node}}
    raise_if([item.text.removeprefix(f"{key}.") for item in problems_of(tree, {key: Transfer}, Transfer)], title)
    given: Transfer = build(tree[key], key)
    raise_if([text.removeprefix(f"{key}: ") for text in _problems_of(given, key)], title)
    return given


@contextlib.contextmanager
def transfer_of(model: str) -> Iterator[None]:
    """Let errors of the block name the transfer."""
    try:
        yield
    except (ConfigError, UsageError) as error:
        raise ConfigError(f"{KEY}.{model}: {error}") from error


@dataclass(frozen=True)
class Pattern:
    """One pattern of a rule."""

    kind: str
    text: str
    value: str | int | None = None  # new name for `map`, dimension for `slice` and `pad`

    def __str__(self) -> str:
        return f"{self.kind} {self.text}" + (
            "" if self.value is None else f" {'→' if self.kind == 'map' else 'in dimension'} {self.value}"
        )

    def matches(self, names: Collection[str], title: str) -> dict[str, tuple[str, ...]]:
        """Return the names that match, with the text for each `*`; raise ConfigError if there are none."""
        return match(self.text, names, f"{self} matches no tensor of {title}", "mlx xp surgery SOURCE")


def match(pattern: str, names: Collection[str], problem: str, command: str) -> dict[str, tuple[str, ...]]:
    """Return the names that match a pattern, with the text for each `*`, as short as possible from the left.

    Raises:
        ConfigError: there are none; it begins with the problem, and suggests the nearest pattern or the command.
    """
    first, *others = rf"{re.escape(pattern)}\Z".split(r"\*")
    # A lookahead keeps its first match, so that a pattern of many `*` takes no more time than one pass for each.
    steps = (rf"(?=(?P<text{number}>.*?){text})(?P=text{number}){text}" for number, text in enumerate(others))
    expression = re.compile(first + "".join(steps), re.DOTALL)
    if found := {name: fit.groups() for name in names if (fit := expression.match(name))}:
        return found
    near = {*names, *(f"{name[: dot.start()]}.*" for name in names for dot in re.finditer(r"\.", name))}
    raise ConfigError(f"{problem}.{suggest(pattern, near, command)}")


def patterns(given: Transfer, *kinds: str) -> list[Pattern]:
    """Return the patterns of the rules of these kinds, in order."""
    found = [(kind, value) for rule in given.rules for kind, value in rule.items() if kind in kinds]
    return [
        Pattern(kind, *item)
        for kind, value in found
        for item in (value.items() if isinstance(value, dict) else [(value,)])
    ]


Named = dict[str, tuple[str, Pattern | None]]
"""Names of tensors in a source, and the patterns that renamed them, by new name."""


def named(given: Transfer, names: Collection[str], title: str) -> Named:
    """Apply the rules `map` and `drop` to the names of a source's tensors, all at once.

    Raises:
        ConfigError: a pattern matches no name, two tensors get one name, or none is left.
    """
    found: Named = {}
    chosen: dict[str, tuple[Pattern, tuple[str, ...]]] = {}
    for pattern in patterns(given, "map", "drop"):
        for name, texts in pattern.matches(names, title).items():
            chosen.setdefault(name, (pattern, texts))
    for name in names:
        rule, texts = chosen.get(name, (None, ()))
        if rule is None or rule.kind == "map":
            first, *rest = [name] if rule is None else str(rule.value).split("*")
            new = first + "".join(map("".join, zip(texts, rest, strict=False)))
            if new in found:
                raise ConfigError(f"both {found[new][0]} and {name} would be {new}; drop one of them")
            found[new] = name, rule
    if not found:
        raise ConfigError(f"the rules drop all tensors of {title}")
    return found


class Treatment(NamedTuple):
    """The origin of the values of one tensor of a model."""

    how: str  # groups tensors in the table
    source: str | None = None  # name in the source; without one, the tensor keeps its initial values


def treatments(
    given: Transfer,
    found: Named,
    shapes: Mapping[str, Sequence[int]],
    targets: Mapping[str, Sequence[int]],
    ties: Mapping[str, Sequence[str]],
) -> dict[str, Treatment]:
    """Return one treatment per tensor of a model.

    Args:
        given: the rules.
        found: tensors of the source, from `named`.
        shapes: their shapes by name in the source.
        targets: shapes of the model's tensors by name.
        ties: all names of a tensor by each of them.

    Raises:
        ConfigError: a pattern is for no tensor of the model, a tensor is in no source, or shapes do not fit.
    """
    order = patterns(given, "fresh", "slice", "pad")
    fitting = {pattern: pattern.matches(targets, "the model") for pattern in order}
    here = {name: [pattern for pattern in order if name in fitting[pattern]] for name in targets}
    fresh = {name: chosen[0] for name, chosen in here.items() if chosen and chosen[0].kind == "fresh"}
    made, missing, used = dict[str, Treatment](), list[str](), set(fresh.values())
    for name, shape in targets.items():
        taken = [other for other in ties[name] if other in found and other not in fresh]
        if name in fresh and taken:
            raise ConfigError(f"{name} is fresh, and one tensor with {taken[0]}, which is not; treat both alike")
        if name in fresh:
            made[name] = Treatment(str(fresh[name]))
        elif name in taken:
            source, renaming = found[name]
            by_dim = {pattern.value: pattern for pattern in reversed(here[name])}
            sizes = enumerate(zip(shape, there := shapes[source], strict=False))
            needed = {dim: "slice" if size < given else "pad" for dim, (size, given) in sizes if size != given}
            applied = [by_dim[dim] for dim in needed if dim in by_dim]  # of several for a dimension, the first one
            how = ", ".join([str(renaming or "same name"), *map(str, applied)])
            if len(shape) != len(there) or [pattern.kind for pattern in applied] != [*needed.values()]:
                raise ConfigError(
                    f"{name} is {(*shape,)} here and {(*there,)} in the source as {source} ({how}); slice takes the "
                    "first rows of a dimension, pad keeps initial values behind them, and fresh keeps all"
                )
            used |= {*applied}
            made[name] = Treatment(how, source)
        elif others := taken or [other for other in ties[name] if other in fresh]:
            made[name] = Treatment(f"tied to {others[0]}")
        else:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(targets)} tensors of the model are not in the source: {some(missing)}. Map those "
            "with another name there; those that stay initial need a rule fresh"
        )
    if idle := [pattern for pattern in order if pattern not in used]:
        raise ConfigError(f"{idle[0]} changes no tensor; remove it, or put it before the rules for the same tensors")
    return made


def some(names: Sequence[str]) -> str:
    """Return the first and the last of many names."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, …, {names[-1]}"
