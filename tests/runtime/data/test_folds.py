"""Cross-validation: the rows of each fold, the datasets that read them, and errors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from mlx_runtime import TrainConfig
from mlx_runtime.config.building import build, build_group
from mlx_runtime.config.composition import Config
from mlx_runtime.data.folds import Fold, fold_rows, rows_digest, with_held_out
from mlx_runtime.data.loaders import DatasetShard, Loader, LoaderOptions
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, DatasetError, MlxError
from mlx_runtime.sections import CrossValidation

pytestmark = pytest.mark.pure

HERE = __name__


class Rows(Dataset):
    """Its rows are their own numbers, negative in evaluation mode."""

    def __init__(self, rows: int = 40, batch_size: int = 3, training: bool = True):
        self.rows, self.batch_size, self.training, self.drop_last = rows, batch_size, training, True

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor(index if self.training else -index)

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Plain(Rows):
    """Has no evaluation mode."""

    def __init__(self, rows: int = 40, batch_size: int = 3):
        super().__init__(rows, batch_size)


class Labelled(Plain):
    """One row in four has the label 1, and five rows are a group."""

    def fold_labels(self):
        return torch.arange(self.rows) % 4 == 0

    def fold_groups(self):
        return [row // 5 for row in range(self.rows)]


class Mnist(Rows):
    """`train` chooses the rows, like that of torchvision's datasets."""

    def __init__(self, train: bool = True):
        super().__init__(60 if train else 10)


class Relabelled(Plain):
    """Its test set has as many rows as its training set."""

    def __init__(self, train: bool = True):
        super().__init__()
        self.label = int(train)

    def fold_labels(self):
        return [self.label] * self.rows


class Stream(IterableDataset):
    def __len__(self):
        return 40


@dataclass
class Datasets:
    train: Any = None
    val: Any = None


class Halves:
    """A splitter that is not of scikit-learn; draws random numbers."""

    def __init__(self, wrong: bool = False):
        self.wrong = wrong

    def split(self, x, y=None, groups=None):
        rows = np.random.permutation(len(x))
        first, second = rows[: len(x) // 2], rows[len(x) // 2 :]
        yield first, (rows if self.wrong else second)
        yield second, first


def node(cls: type, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{cls.__name__}", **arguments}


def splitter(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"sklearn.model_selection.{name}", **arguments}


def config(
    train: Any, folds: int = 5, fold: int = 0, split: dict[str, Any] | None = None, seed: int = 0, val: Any = None
) -> Config:
    cfg = TrainConfig(cross_validation=CrossValidation(folds, fold, build(split)), seed=seed)
    tree = {"cfg": {"cross_validation": {"splitter": split}}, "datasets": node(Datasets, train=train, val=val)}
    return Config(tree, tree, cfg)


def shards(of: Config, fold: Fold, rank: int = 0, world_size: int = 1, **options: Any) -> list[DatasetShard]:
    """Return the shards of train and val that a worker of a fold gets."""
    tree, topology = (
        with_held_out(of.tree, of.cfg.cross_validation.fold),
        Topology(rank, world_size, torch.device("cpu")),
    )
    group = build_group(tree["datasets"], "datasets", lambda _: torch.random.fork_rng())
    return [
        DatasetShard(name, group, topology, LoaderOptions(seed=7, **options), subset=fold.subsets()[name])
        for name in ("train", "val")
    ]


def read(loader: Loader) -> list[int]:
    return [row for batch in loader for row in batch["x"].tolist()]


def check_partition(folds: Sequence[Fold], rows: int) -> None:
    for fold in folds:
        assert sorted([*fold.train, *fold.held_out]) == list(range(rows))
    assert sorted(row for fold in folds for row in fold.held_out) == list(range(rows))


@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_held_out_once_and_never_in_both_parts(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        folds, cls = chance.randint(2, 8), chance.choice([Rows, Plain, Labelled])
        train = node(cls, rows=chance.randint(8 * 5, 200))
        arguments = {} if chance.random() < 0.3 else {"n_splits": folds}
        kind = chance.choice(["KFold", "StratifiedKFold", "GroupKFold"] if cls is Labelled else ["KFold", None])
        split = splitter(kind, **arguments) if kind else None
        check_partition(fold_rows(config(train, folds, split=split, seed=chance.randint(0, 9))), train["rows"])


def test_folds_depend_on_the_seed_only() -> None:
    by_default = [rows_digest(fold_rows(config(node(Rows), seed=seed, fold=fold))) for seed, fold in ((0, 0), (0, 3))]
    assert by_default[0] == by_default[1] != rows_digest(fold_rows(config(node(Rows), seed=1)))
    for split in (node(Halves), splitter("StratifiedKFold", shuffle=True)):  # both draw from NumPy's generator
        folds = 2 if split == node(Halves) else 5
        one, same, other = (
            rows_digest(fold_rows(config(node(Labelled), folds, split=split, seed=seed))) for seed in (0, 0, 1)
        )
        assert one == same != other


def test_labels_and_groups_come_from_the_dataset() -> None:
    for fold in fold_rows(config(node(Labelled), split=splitter("StratifiedKFold"))):
        assert sum(row % 4 == 0 for row in fold.held_out) == 2
    for fold in fold_rows(config(node(Labelled), 4, split=splitter("GroupKFold"))):
        assert {row // 5 for row in fold.train} & {row // 5 for row in fold.held_out} == set()
    folds = fold_rows(config(node(Labelled), 8, split=splitter("LeaveOneGroupOut")))
    assert [len(fold.held_out) for fold in folds] == [5] * 8


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.process)])
def test_workers_of_any_number_read_the_rows_of_the_fold(processes: int) -> None:
    of = config(node(Rows, rows=41, batch_size=3), val=node(Rows, batch_size=4))
    fold = fold_rows(of)[of.cfg.cross_validation.fold]
    for world_size in (1, 2, 3) if not processes else (2,):
        ranks = [shards(of, fold, rank, world_size, processes=processes) for rank in range(world_size)]
        loaders = [[shard.iter_torch_batches() for shard in of_rank] for of_rank in ranks]
        first, second = ([row for train, _ in loaders for row in read(train)] for _ in range(2))
        assert len(loaders[0][0]) == len(fold.train) // (3 * world_size)  # it drops its last batch
        assert first != second
        assert {*first, *second} <= {*fold.train.tolist()}
        for _ in range(2):  # the evaluation mode, all rows, in order
            held_out = [row for _, val in loaders for row in read(val)]
            assert sorted(held_out, reverse=True) == (-fold.held_out).tolist()
            assert {val.batch_size for _, val in loaders} == {4}
            assert not any(val.shard.training for _, val in loaders)


def test_an_interrupted_pass_continues_in_the_same_fold() -> None:
    of = config(node(Rows, rows=100))
    fold = fold_rows(of)[0]
    whole = read(shards(of, fold)[0].iter_torch_batches())
    begun = shards(of, fold)[0].iter_torch_batches()
    passing = iter(begun)
    seen = [row for _ in range(5) for row in next(passing)["x"].tolist()]
    resumed = shards(of, fold)[0].iter_torch_batches()
    resumed.load_state_dict(begun.state_dict())
    assert seen + read(resumed) == whole
    rest = []
    for rank in range(2):  # another number of workers
        loader = shards(of, fold, rank, 2)[0].iter_torch_batches(drop_last=False)
        loader.load_state_dict(begun.state_dict())
        rest += read(loader)
    assert sorted(seen + rest) == fold.train.tolist()


class TestEvaluationMode:
    @pytest.mark.parametrize(
        ("train", "changed"),
        [
            (node(Rows), {"training": False}),
            (node(Rows, training=False), {"training": False}),
            (node(Mnist), {"train": False}),
            (node(Plain), {}),
        ],
    )
    def test_an_argument_selects_it(self, train: dict[str, Any], changed: dict[str, bool]) -> None:
        tree = with_held_out(config(train).tree, 0)
        assert tree["datasets"]["val"] == train | changed
        assert with_held_out(tree, 0) == tree
        assert bool(Fold.leak_warning(tree)) == (not changed)

    @pytest.mark.parametrize("cls", [Mnist, Relabelled])
    def test_it_must_have_the_same_rows(self, cls: type) -> None:
        with pytest.raises(DatasetError, match=rf"through {cls.__name__} .* has other rows .* training: bool"):
            fold_rows(config(node(cls)))


@pytest.mark.parametrize(
    ("train", "folds", "split", "message"),
    [
        (
            Rows,
            41,
            None,
            "cfg.cross_validation.folds is 41, but datasets.train has only 40 rows; lower it",
        ),
        (
            Plain,
            5,
            splitter("StratifiedKFold"),
            r"cannot split the rows of datasets.train: .* \(if the splitter needs labels or groups: Plain needs a",
        ),
        (Labelled, 35, splitter("StratifiedKFold"), "cannot split the rows of datasets.train: n_splits=35"),
        (
            Labelled,
            5,
            splitter("KFold", n_splits=3),
            "3 folds, but cfg.cross_validation.folds is 5; set cfg.cross_validation.folds=3",
        ),
        (Stream, 5, None, "cfg.cross_validation cannot split datasets.train: Stream is a stream"),
    ],
)
def test_what_cannot_be_split_is_refused(train: type, folds: int, split: Any, message: str) -> None:
    with pytest.raises(MlxError, match=message) as caught:
        fold_rows(config(node(train), folds, split=split))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_both_datasets_are_needed(missing: str) -> None:
    of = config(node(Rows))
    del of.tree["datasets"][missing]
    with pytest.raises(ConfigError, match=rf"conf.yaml has no datasets.{missing}; add it to Datasets"):
        fold_rows(of)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"folds": 5}, "cfg.cross_validation.folds is 5 and cfg.cross_validation.fold is None; set both, or neither"),
        (
            {"folds": 5, "fold": 5},
            "cfg.cross_validation.fold is 5; with cfg.cross_validation.folds=5, it is from 0 to",
        ),
        ({"splitter": "KFold"}, "cfg.cross_validation.splitter is 'KFold'; it takes an object that splits rows"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], problem: str) -> None:
    (found,) = TrainConfig.out_of_range(TrainConfig(cross_validation=CrossValidation(**settings)))
    assert found.startswith(problem)
