"""The zoo: every kind of default that a constructor can have, written like user code, in a plain module.

Each class is a group. The defaults of a `Keep…` class must be re-created exactly, that of the only argument `it` of a
`Refuse…` class must be rejected.
"""

import dataclasses
import enum
import functools
import math
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset

from mlx_runtime import DUMMY_PARAMS


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: float = 2.0


@dataclass
class Plain:
    width: int = 3
    names: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class Nested:
    plain: Plain = dataclasses.field(default_factory=Plain)
    more: Plain = dataclasses.field(default_factory=lambda: Plain(width=5))


class Forgetful:
    """Does not store its argument."""

    def __init__(self, width: int = 1):
        pass


class Renaming:
    """Stores another value under the argument's name."""

    def __init__(self, width: int = 1, depth: int = 2):
        self.depth = width * 10
        self._w = depth


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width: int = 1):
        self.width = width


class Base:
    def __init__(self, width: int = 1, *, flag: bool = False):
        self.width, self.flag = width, flag


class Variadic:
    def __init__(self, first: int, *rest: int, scale: float = 1.0):
        self.all = (first, *rest, scale)


class Keywords:
    def __init__(self, width: int = 1, **options: Any):
        self.width, self.options = width, options


class PositionalOnly:
    def __init__(self, width: int, depth: int = 2, /, flag: bool = False):
        self.all = (width, depth, flag)


class Factory:
    def __init__(self, width: int):
        self.width = width

    @classmethod
    def wide(cls, by: int = 10) -> "Factory":
        return cls(by)


def make_net(width: int = 4, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width, bias=bias), nn.ReLU())


class Tied(nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = self.a
        self.register_buffer("scale", torch.ones(width))


class Rows(Dataset):
    constructed = 0

    def __init__(self, rows: int = 10, transform: Any = None):
        type(self).constructed += 1
        self.rows, self.transform = rows, transform


class Arrays:
    def __init__(self, size: int = 3):
        self.window, self.by_key = np.hanning(size), {frozenset({"a"}): np.ones(size)}
        self.refs = [weakref.ref(self)]


class Drawn:
    """Differs at random from any other instance."""

    def __init__(self, width: int = 1):
        self.width, self.noise, self.started = width, np.random.rand(3), time.monotonic()


class Touchy:
    """Raises when compared."""

    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise TypeError("not this one")

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def softness(x):
    return x


class Keep:
    """One argument per kind of default."""

    def __init__(
        self,
        nan: float = math.nan,
        negative_zero: float = -0.0,
        sizes: tuple[int, ...] = (5, 10, 5),
        tuple_in_union: Union[int, tuple[int, int]] = (3, 3),  # noqa: UP007
        mapping: dict[str, Any] = {"a": 1, "b": [True, None], "c": {"d": (1,)}},
        numbers: set[int] = {3, 1},
        content: bytes = bytes([0, 255]),
        path: Path = Path("data/x"),
        str_or_path: str | Path = Path("x"),
        color: Color = Color.BLUE,
        literal: Literal["a", "b", 1] = "b",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device = torch.device("cpu"),
        tensor: torch.Tensor = torch.tensor([1.0, 2.0]),
        positional_layer: nn.Linear = nn.Linear(32, 10),
        comprehension: nn.ModuleList = nn.ModuleList([nn.Linear(n, n) for n in range(1, 4)]),
        tied: Tied = Tied(2),
        variadic: Variadic = Variadic(1, 2, 3, scale=2.0),
        keywords: Keywords = Keywords(2, lr=0.1, name="x"),
        positional_only: PositionalOnly = PositionalOnly(1, flag=True),
        partial: functools.partial = functools.partial(nn.Linear, 3, bias=False),
        classmethod: Factory = Factory.wide(20),
        function_factory: nn.Sequential = make_net(2, bias=False),
        metric: torchmetrics.Metric = torchmetrics.MeanMetric(nan_strategy="ignore"),
        optimizer: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=1e-4, betas=(0.8, 0.9)),
        function: Any = softness,
        layer: type[nn.Module] = nn.GELU,
        nested_dataclass: Nested = Nested(),
        named_tuple: Point = Point(1),
        forgetful: Forgetful = Forgetful(5),
        slotted: Slotted = Slotted(4),
        dataset: Rows = Rows(5, transform=Renaming(2)),
        arrays: Arrays = Arrays(5),
        drawn: Drawn = Drawn(5),
    ): ...


@dataclass
class KeepField:
    it: nn.Linear = nn.Linear(1, 2)


@dataclass
class KeepFactoryField:
    it: list[int] = field(default_factory=lambda: [1, 2])


CHANGED = Base(1)
CHANGED.width = 2

SCALED = nn.Linear(1, 1)
with torch.no_grad():
    SCALED.weight.zero_()


CHANGED_DRAWN = Drawn(1)
CHANGED_DRAWN.width = 2


class RefuseLambda:
    def __init__(self, it: Any = lambda x: x): ...


class RefuseChangedConstant:
    def __init__(self, it: Base = CHANGED): ...


class RefuseChangedWeights:
    def __init__(self, it: nn.Linear = SCALED): ...


class RefuseChangedDrawn:
    def __init__(self, it: Drawn = CHANGED_DRAWN): ...


class RefuseTouchy:
    def __init__(self, it: Touchy = Touchy()): ...


class RefuseMissingMark:
    def __init__(self, it: str = "???"): ...


class RefuseReservedKey:
    def __init__(self, it: dict = {"_target_": "x"}): ...


class RefuseReservedArgument:
    def __init__(self, _target_: int = 1, it: int = 1): ...
