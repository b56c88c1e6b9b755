"""The zoo: one class per kind of default that a constructor can have, written like user code, in a plain module.

Each class is a group with one argument, `it`. The default of a `Keep…` class must be re-created exactly, that of a
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


class KeepSmallFloat:
    def __init__(self, it: float = 1e-08): ...


class KeepNan:
    def __init__(self, it: float = math.nan): ...


class KeepNegativeZero:
    def __init__(self, it: float = -0.0): ...


class KeepWordYes:
    def __init__(self, it: str = "yes"): ...


class KeepSpecialCharacters:
    def __init__(self, it: str = "a: b # c\n'd' \"e\" \t{f} [g] é"): ...


class KeepInterpolationLookalike:
    def __init__(self, it: str = "${not.me} and \\${me}"): ...


class KeepTuple:
    def __init__(self, it: tuple[int, ...] = (5, 10, 5)): ...


class KeepTupleInUnion:
    def __init__(self, it: Union[int, tuple[int, int]] = (3, 3)): ...  # noqa: UP007


class KeepDict:
    def __init__(self, it: dict[str, Any] = {"a": 1, "b": [True, None], "c": {"d": (1,)}}): ...


class KeepSet:
    def __init__(self, it: set[int] = {3, 1}): ...


class KeepBytes:
    def __init__(self, it: bytes = bytes([0, 255])): ...


class KeepPath:
    def __init__(self, it: Path = Path("data/x")): ...


class KeepStrOrPath:
    def __init__(self, it: str | Path = Path("x")): ...


class KeepEnum:
    def __init__(self, it: Color = Color.BLUE): ...


class KeepLiteral:
    def __init__(self, it: Literal["a", "b", 1] = "b"): ...


class KeepDtype:
    def __init__(self, it: torch.dtype = torch.bfloat16): ...


class KeepDevice:
    def __init__(self, it: torch.device = torch.device("cpu")): ...


class KeepTensor:
    def __init__(self, it: torch.Tensor = torch.tensor([1.0, 2.0])): ...


class KeepPositionalLayer:
    def __init__(self, it: nn.Linear = nn.Linear(32, 10)): ...


class KeepComprehension:
    def __init__(self, it: nn.ModuleList = nn.ModuleList([nn.Linear(n, n) for n in range(1, 4)])): ...


class KeepTied:
    def __init__(self, it: Tied = Tied(2)): ...


class KeepVariadic:
    def __init__(self, it: Variadic = Variadic(1, 2, 3, scale=2.0)): ...


class KeepKeywords:
    def __init__(self, it: Keywords = Keywords(2, lr=0.1, name="x")): ...


class KeepPositionalOnly:
    def __init__(self, it: PositionalOnly = PositionalOnly(1, flag=True)): ...


class KeepPartial:
    def __init__(self, it: functools.partial = functools.partial(nn.Linear, 3, bias=False)): ...


class KeepClassmethod:
    def __init__(self, it: Factory = Factory.wide(20)): ...


class KeepFunctionFactory:
    def __init__(self, it: nn.Sequential = make_net(2, bias=False)): ...


class KeepMetric:
    def __init__(self, it: torchmetrics.Metric = torchmetrics.MeanMetric(nan_strategy="ignore")): ...


class KeepOptimizer:
    def __init__(self, it: torch.optim.AdamW = torch.optim.AdamW(DUMMY_PARAMS, lr=1e-4, betas=(0.8, 0.9))): ...


class KeepFunction:
    def __init__(self, it: Any = softness): ...


class KeepClass:
    def __init__(self, it: type[nn.Module] = nn.GELU): ...


class KeepNestedDataclass:
    def __init__(self, it: Nested = Nested()): ...


class KeepNamedTuple:
    def __init__(self, it: Point = Point(1)): ...


class KeepForgetful:
    def __init__(self, it: Forgetful = Forgetful(5)): ...


class KeepSlotted:
    def __init__(self, it: Slotted = Slotted(4)): ...


class KeepDataset:
    def __init__(self, it: Rows = Rows(5, transform=Renaming(2))): ...


class KeepArrays:
    def __init__(self, it: Arrays = Arrays(5)): ...


class KeepDrawn:
    def __init__(self, it: Drawn = Drawn(5)): ...


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
