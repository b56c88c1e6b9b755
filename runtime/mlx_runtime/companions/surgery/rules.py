"""Rules by which the tensors of a model get their values: from which tensor of a source, and how shapes are fitted.

Nothing here reads a tensor: names and shapes are enough to see whether the rules fit.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.storage.documents import TEXT, Kind, list_of, mapping_of, misfit

_DIMENSIONS = mapping_of(Kind("a dimension, from 0", lambda value: type(value) is int and value >= 0))

KINDS = {"map": mapping_of(TEXT), "drop": TEXT, "fresh": TEXT, "slice": _DIMENSIONS, "pad": _DIMENSIONS}
"""Types of the values of rules. The keys in mappings are patterns."""

_TEXTS = list_of(TEXT)

SHAPE = {
    "source": Kind("text, or a list of text", lambda value: value != [] and _TEXTS.fits(_listed(value))),
    "model": TEXT.or_null(),
    "rules": list_of(Kind("mappings with one key", lambda value: isinstance(value, dict) and len(value) == 1)),
}

Shape = tuple[int, ...]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Rule:
    """One pattern of a rule. In patterns, `*` stands for any text, including dots."""

    key: str  # of the transfer, for messages
    kind: str  # one of KINDS
    pattern: str
    value: Any = None  # new name for `map`, in which `*` stands for the same text; dimension for `slice` and `pad`

    def __str__(self) -> str:
        arrow = "→" if self.kind == "map" else "in dimension"
        return f"{self.kind} {self.pattern}" + ("" if self.value is None else f" {arrow} {self.value}")

    def matches(self, names: Iterable[str], title: str) -> dict[str, tuple[str, ...]]:
        """Return the names that match, with the text for each `*`; raise ConfigError if there are none."""
        expression = re.compile("(.*?)".join(map(re.escape, self.pattern.split("*"))))
        known = list(names)
        found = {name: match.groups() for name in known if (match := expression.fullmatch(name))}
        if not found:
            parts = [name.split(".") for name in known]
            near = {*known, *(".".join([*part[:n], "*"]) for part in parts for n in range(1, len(part)))}
            cure = suggest(self.pattern, near, "mlx xp surgery SOURCE")
            raise ConfigError(f"{self.key}: {self} matches no tensor of {title}.{cure}")
        return found

    def refuse(self, other: "Rule", name: str) -> NoReturn:
        raise ConfigError(f"{self.key}: two rules are for {name}: {self}, and {other}; leave it to one of them")


@dataclass(frozen=True)
class Transfer:
    """Weights of one model from elsewhere, as an entry of `cfg.transfer` describes them.

    Attributes:
        key: key of the entry, for messages.
        sources: sources, as typed or pinned; the mean of several is taken.
        model: model in sources that have several, by default the one of the same name.
        rules: applied in order.
    """

    key: str
    sources: tuple[str, ...]
    model: str | None
    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, node: Any, key: str) -> "Transfer":
        """Return the transfer that a node describes, or raise ConfigError."""
        if problem := misfit(node, SHAPE, needs=("source",)):
            raise ConfigError(f"{key}: {problem}")
        if unknown := node.keys() - SHAPE.keys():
            raise ConfigError(f"{key} has no {unknown.pop()!r}; it has {', '.join(SHAPE)}")
        rules = []
        for index, item in enumerate(node.get("rules", ())):
            [(kind, value)] = item.items()
            if kind not in KINDS:
                raise ConfigError(f"{key}.rules[{index}] is {kind!r}, which is no rule.{suggest(str(kind), KINDS)}")
            if not KINDS[kind].fits(value):
                raise ConfigError(f"{key}.rules[{index}]: {kind} takes {KINDS[kind].title}, not {value!r:.100}")
            for pattern, other in value.items() if isinstance(value, dict) else [(value, None)]:
                rules.append(Rule(key, kind, pattern, other))
                if str(other).count("*") > pattern.count("*"):
                    raise ConfigError(f"{key}: {rules[-1]} has more * in the new name than in the pattern")
        return cls(key, tuple(_listed(node["source"])), node.get("model"), tuple(rules))

    def of_kinds(self, *kinds: str) -> list[Rule]:
        return [rule for rule in self.rules if rule.kind in kinds]


def problems(cfg: Any) -> list[str]:
    """Return the first problem of `cfg.transfer`, if there is one."""
    try:
        for name, node in cfg.transfer.items():
            Transfer.parse(node, f"cfg.transfer.{name}")
    except ConfigError as error:
        return [str(error)]
    return []


Named = dict[str, tuple[str, Rule | None]]
"""Names of tensors in a source, and the rules that renamed them, by new name."""


def named(transfer: Transfer, names: Iterable[str], title: str) -> Named:
    """Apply the rules `map` and `drop` to the names of a source's tensors.

    Raises:
        ConfigError: a pattern matches no name, two rules are for one tensor, or two tensors get one name.
    """
    found: Named = {name: (name, None) for name in names}
    for rule in transfer.of_kinds("map", "drop"):
        renamed: list[tuple[str, str]] = []
        for name, texts in rule.matches(found, title).items():
            source, before = found.pop(name)
            if before is not None:
                before.refuse(rule, source)
            if rule.kind == "map":
                first, *rest = rule.value.split("*")
                renamed.append((first + "".join(map("".join, zip(texts, rest, strict=False))), source))
        for new, source in renamed:
            if new in found:
                raise ConfigError(f"{rule.key}: both {found[new][0]} and {source} would be {new}; drop one of them")
            found[new] = source, rule
    return found


@dataclass(frozen=True)
class Treatment:
    """The origin of the values of one tensor of a model."""

    names: tuple[str, ...]  # several if it is tied
    shape: Shape
    how: str  # groups treatments in the table
    sources: tuple[str, ...] = ()  # its names in the source; without any, it keeps its initial values
    source_shape: Shape = ()

    @property
    def region(self) -> Shape:
        """Size of the part of both tensors that is copied: their first rows in each dimension."""
        return tuple(map(min, self.shape, self.source_shape))


def treatments(
    transfer: Transfer, found: Named, shapes: Mapping[str, Shape], targets: Mapping[tuple[str, ...], Shape]
) -> list[Treatment]:
    """Return one treatment per tensor of a model.

    Args:
        transfer: the rules.
        found: tensors of the source, from `named`.
        shapes: their shapes by name in the source.
        targets: shapes of the model's tensors by all of their names.

    Raises:
        ConfigError: a pattern matches no tensor of the model, a tensor is in no source, shapes do not fit, or two rules
            are for one tensor.
    """
    names = [name for tied in targets for name in tied]
    fitting = [(rule, rule.matches(names, "the model")) for rule in transfer.of_kinds("fresh", "slice", "pad")]
    made, missing = [], []
    for tied, shape in targets.items():
        here = [found[name] for name in tied if name in found]
        rules: dict[int | None, Rule] = {}  # by dimension; None for `fresh`
        for rule in [rule for rule, matches in fitting if not matches.keys().isdisjoint(tied)]:
            if (before := rules.setdefault(rule.value, rule)) is not rule:
                before.refuse(rule, tied[0])
        if None in rules:
            others = [rule for dim, rule in rules.items() if dim is not None]
            for other in others + [rule for _, rule in here if rule is not None]:
                rules[None].refuse(other, tied[0])
            made.append(Treatment(tied, shape, str(rules[None])))
        elif here:
            made.append(_fitted(transfer, tied, shape, here, shapes[here[0][0]], rules))
        else:
            missing.append(tied[0])
    if missing:
        raise ConfigError(
            f"{transfer.key}: {len(missing)} of {len(targets)} tensors of the model are not in the source: "
            f"{some(missing)}. Map those with another name there; those that stay initial need a rule fresh"
        )
    return made


def _fitted(
    transfer: Transfer,
    names: tuple[str, ...],
    shape: Shape,
    here: Sequence[tuple[str, Rule | None]],
    there: Shape,
    rules: Mapping[int | None, Rule],
) -> Treatment:
    source, rule = here[0]
    sizes = enumerate(zip(shape, there, strict=False))
    needed = {dim: "slice" if size < given else "pad" for dim, (size, given) in sizes if size != given}
    applied = [str(rule or "same name"), *(str(rules[dim]) for dim in needed if dim in rules)]
    fits = [dim in rules and rules[dim].kind == kind for dim, kind in needed.items()]
    if len(shape) != len(there) or not all(fits):
        raise ConfigError(
            f"{transfer.key}: {names[0]} is {shape} here and {there} in the source as {source} ({', '.join(applied)}); "
            "slice takes the first rows of a dimension, pad keeps initial values behind them, and fresh keeps all"
        )
    return Treatment(names, shape, ", ".join(applied), tuple(name for name, _ in here), there)


def unused(found: Named, made: Sequence[Treatment]) -> list[str]:
    """Return the names of the source's tensors that no rule drops and no tensor of the model takes."""
    taken = {name for item in made for name in item.sources}
    return [source for source, _ in found.values() if source not in taken]


def some(names: Sequence[str]) -> str:
    """Return the first and the last of many names."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, …, {names[-1]}"
