"""Modules imported under the hook load no data, and a group constructs its datasets on first use."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from torch.utils.data import Subset

from mlx_runtime.config.building import build_group
from mlx_runtime.config.constructors.declarations import Declaration, defer_loading

pytestmark = pytest.mark.pure

SOURCE = """
import enum
from collections import namedtuple
from dataclasses import dataclass, field

from torch.utils.data import Dataset, Subset

made = []


class Rows(Dataset):
    def __init__(self, count=3):
        made.append(count)
        self.count = count

    @classmethod
    def double(cls, count):
        return cls(2 * count)

    def __len__(self):
        return self.count


class Around(Dataset):
    def __init__(self, inner=Rows(1)):
        self.inner = inner


CONSTANT = Rows(4)


def later(rows=Rows(5), *, more=Rows.double(6), each=lambda rows=Rows(7): rows):
    return Rows(8)


@dataclass
class Fields:
    rows: Rows = field(default_factory=lambda: Rows(9))
    other: "Rows" = Rows(10)


class Datasets:
    def __init__(self, train: Rows = Rows(11), val: Around = Around(Rows(12)), text: str = "a"):
        self.train, self.val, self.text = train, val, text


class Splits(Datasets):
    def __init__(self, train: Rows = Rows(3)):
        self.train, self.first = train, Subset(train, [0])


class Counts(Datasets):
    def __init__(self, train: Rows = Rows(3)):
        self.train, self.count = train, train.count


Point = namedtuple("Point", "x y")
Color = enum.Enum("Color", "RED GREEN")
SIZES = [len(name) for name in sorted(("a", "bc"))]
MADE_BY_IMPORT = list(made)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("declared")
    (folder / "declared_source.py").write_text(SOURCE)
    defer_loading("declared_source")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("declared_source")
    sys.path.remove(str(folder))
    del sys.modules["declared_source"]
    assert not (folder / "__pycache__").exists()


@pytest.fixture(autouse=True)
def made(source: ModuleType) -> list[int]:
    source.made.clear()
    return source.made  # type: ignore[no-any-return]


def test_importing_a_module_makes_no_dataset(source: ModuleType) -> None:
    assert source.MADE_BY_IMPORT == []
    defaults = source.Datasets.__init__.__defaults__
    for declared in (source.CONSTANT, *source.later.__defaults__, *defaults[:2]):
        assert isinstance(declared, Declaration)
    assert repr(defaults[1]) == "Around(Rows(12))"
    assert repr(source.later.__kwdefaults__["more"]) == "Rows.double(6)"


@pytest.mark.parametrize("name", ["Splits", "Counts"])
def test_a_group_that_uses_its_datasets_makes_them_at_once(name: str, made: list[int]) -> None:
    rows = {"_target_": "declared_source.Rows", "count": 11}
    node = {"_target_": f"declared_source.{name}", "train": rows}
    group = build_group(node, "datasets", contextlib.nullcontext)
    assert vars(group)["train"].count == 11
    if name == "Splits":
        assert isinstance(group.first, Subset)
        assert group.first.dataset is group.train
    assert made.count(11) == 1
