"""Cross-validation: a splitter of scikit-learn divides the rows of `datasets.train` into folds.

A run with `folds` and `fold` in `cfg.cross_validation` trains on the rows of all folds except one. The rows of that
fold replace `datasets.val`; a second instance of the dataset, in evaluation mode, reads them.
"""

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data
from torch.utils.data import IterableDataset

from mlx_runtime.config.building import Tree, build, build_group
from mlx_runtime.config.composition import Config
from mlx_runtime.config.constructors.signatures import parameters
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.data.batches import dataset_error, rows_of
from mlx_runtime.data.definitions import adopt_dataset, construction, dataset_nodes
from mlx_runtime.data.sampling import Subset
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import USER_ERRORS, ConfigError, DatasetError, short_message
from mlx_runtime.extras import require

PER_ROW = ("fold_labels", "fold_groups")
"""Methods of a dataset that return an array with one item per row, for splitters that need labels or groups."""

HELD_OUT = {"training": False, "shuffle": False, "drop_last": False}
"""Attributes of the instance for the held-out rows, regardless of those of `datasets.train`."""

UNNUMBERED = "whose rows have no numbers; use a dataset with __getitem__ and __len__"
"""Reason why a stream cannot be split, and the cure."""

_PerRow = npt.NDArray[Any] | None


def problems(cfg: Any) -> list[str]:
    """Return one line per setting of a cross-validation that contradicts another."""
    found, key = [], "cfg.cross_validation"
    if (cfg.folds is None) != (cfg.fold is None):
        found.append(f"{key}.folds is {cfg.folds} and {key}.fold is {cfg.fold}; set both, or neither")
    elif cfg.folds is not None and cfg.fold is not None and cfg.fold >= cfg.folds:
        found.append(f"{key}.fold is {cfg.fold}; with {key}.folds={cfg.folds}, it is from 0 to {cfg.folds - 1}")
    if isinstance(cfg.splitter, str) or not (cfg.splitter is None or hasattr(cfg.splitter, "split")):  # str.split
        example = f"'{key}.splitter={{_target_: sklearn.model_selection.StratifiedKFold, shuffle: true}}'"
        found.append(f"{key}.splitter is {cfg.splitter!r}; it takes an object that splits rows, like {example}")
    return found


class Fold(NamedTuple):
    """Row numbers of `datasets.train`, ascending: rows to train on, and rows held out for validation."""

    train: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]

    def subsets(self) -> dict[str, Subset]:
        """Return the subsets that a run of this fold reads, by name in `Datasets`."""
        train, held_out = map(torch.from_numpy, self)
        return {"train": Subset(train), "val": Subset(held_out, HELD_OUT)}

    @property
    def digest(self) -> str:
        """Digest of its row numbers."""
        return rows_digest([self])

    @staticmethod
    def leak_warning(tree: Tree) -> str | None:
        """Return a warning if `datasets.train` has no argument that selects its evaluation mode."""
        node = dataset_nodes(tree)["train"]
        if _switches(node):
            return None
        return (
            "the held-out rows are read exactly as datasets.train reads them: "
            f"{_class_name(node)} has no argument training or augment that turns off augmentation"
        )


def rows_digest(folds: Sequence[Fold]) -> str:
    """Return a digest of the row numbers of folds."""
    found = hashlib.sha256()
    for rows in (rows for fold in folds for rows in fold):
        found.update(len(rows).to_bytes(8, "big") + rows.astype("<i8").tobytes())
    return found.hexdigest()[:12]


def with_held_out(tree: Tree, fold: int | None) -> Tree:
    """Return a config in which `datasets.val` is `datasets.train` in evaluation mode; unchanged without a fold.

    Raises:
        ConfigError: There are no such datasets, or `datasets.train` is a stream.
    """
    if fold is None:
        return tree
    group, node = tree.get("datasets", {}), dataset_nodes(tree).get("train")
    if node is None or "val" not in group:
        raise ConfigError(
            "cfg.cross_validation splits datasets.train, and the held-out rows replace datasets.val, but conf.yaml has "
            f"no datasets.{'train' if node is None else 'val'}; add it to Datasets, then: mlx train bind"
        )
    cls = object_at(node["_target_"])
    if hasattr(cls, "to_ray") or (isinstance(cls, type) and issubclass(cls, IterableDataset)):
        raise ConfigError(f"cfg.cross_validation cannot split datasets.train: {cls.__name__} is a stream, {UNNUMBERED}")
    changed = dict.fromkeys(_switches(node), False)
    val = group["val"]
    if isinstance(val, dict) and "batch_size" in val and "batch_size" in node:
        changed["batch_size"] = val["batch_size"]
    return tree | {"datasets": group | {"val": {**node, **changed}}}


def fold_rows(config: Config) -> list[Fold]:
    """Split `datasets.train` into folds, which depend only on the dataset, the splitter and the seed.

    Raises:
        ConfigError: The splitter cannot split the rows, for example because it needs labels.
        DatasetError: The dataset cannot be constructed, or has other rows in evaluation mode.
    """
    cfg, tree = config.cfg, with_held_out(config.tree, config.cfg.cross_validation.fold)
    nodes = tree["datasets"]
    group = build_group(nodes, "datasets", lambda name: construction(nodes[name], cfg.seed))
    try:
        train = adopt_dataset(group.train, "train", nodes["train"])
        if isinstance(train, IterableDataset):
            raise ConfigError(f"cfg.cross_validation cannot split datasets.train: it is a stream, {UNNUMBERED}")
        rows = rows_of(train, "train")
        arrays = [_per_row(train, name, rows) for name in PER_ROW]
        if _switches(nodes["train"]):
            _check_same_rows(train, adopt_dataset(group.val, "val", nodes["val"]), rows, arrays)
    except USER_ERRORS as error:
        raise dataset_error(error, "cfg.cross_validation cannot split datasets.train") from error
    wanted, key = cfg.cross_validation.folds, "cfg.cross_validation.folds"
    if rows < wanted:
        raise ConfigError(f"{key} is {wanted}, but datasets.train has only {rows} rows; lower it")
    splitter = _splitter(config)
    title = f"cfg.cross_validation.splitter: {type(splitter).__name__}"
    try:
        folds = _split(splitter, rows, cfg.seed, arrays)
    except USER_ERRORS as error:
        missing = [name for name, values in zip(PER_ROW, arrays, strict=True) if values is None]
        cls, lacks = _class_name(nodes["train"]), " or ".join(missing)
        cure = f" ({cls} has no method {lacks}, which returns an array with one item per row)" if missing else ""
        raise ConfigError(f"{title} cannot split the rows of datasets.train{cure}: {short_message(error)}") from error
    if len(folds) != wanted:
        cure = f"set {key}={len(folds)}, or change the arguments of the splitter"
        raise ConfigError(f"{title} makes {len(folds)} folds, but {key} is {wanted}; {cure}")
    for number, fold in enumerate(folds):
        if not all(map(len, fold)) or np.intersect1d(*fold).size:
            raise ConfigError(f"{title}: one part of fold {number} is empty, or both have rows in common")
    return folds


def fold_of(config: Config, recorded: str | None = None, again: str = "") -> Fold:
    """Return the rows of a run in a cross-validation.

    Args:
        config: Config of the run.
        recorded: Digest of the rows in the record of a run to resume, which must be the same.
        again: Command that starts over in a new run.
    """
    number = config.cfg.cross_validation.fold
    fold: Fold = fold_rows(config)[number]
    if recorded not in (None, fold.digest):
        raise ConfigError(
            f"fold {number} has different rows than when the run started: the data, its labels or the splitter has "
            f"changed. Start over in a new run: {again}"
        )
    return fold


def shuffled_folds(rows: int, folds: int, seed: int) -> list[Fold]:
    """Split numbered rows into folds of about the same size, shuffled by the seed."""
    return _split(_shuffling(folds, seed), rows, seed, ())


def load_fold(datasets: Tree, cfg: Tree) -> Any:
    """Build the datasets for a run of a fold: `train` and `val` are the `Subset`s to train on and held out.

    Raises:
        ConfigError: As for `fold_rows`.
        DatasetError: As for `fold_rows`.
    """
    section = build(cfg["cross_validation"], "cfg.cross_validation")
    settings = SimpleNamespace(seed=cfg["seed"], cross_validation=section)
    config = Config({"datasets": datasets, "cfg": cfg}, {}, settings)
    rows = fold_rows(config)[section.fold]
    nodes = with_held_out(config.tree, section.fold)["datasets"]
    group = build_group(nodes, "datasets", lambda name: construction(nodes[name], settings.seed))
    for name, numbers in (("train", rows.train), ("val", rows.held_out)):
        part = data.Subset(adopt_dataset(getattr(group, name), name, nodes[name]), numbers.tolist())
        object.__setattr__(group, name, part)  # works for a frozen dataclass, too
    return group


def _splitter(config: Config) -> Any:
    section = config.cfg.cross_validation
    if section.splitter is None:
        return _shuffling(section.folds, config.cfg.seed)
    splitter = copy.copy(section.splitter)
    if hasattr(splitter, "n_splits") and "n_splits" not in config.tree["cfg"]["cross_validation"]["splitter"]:
        splitter.n_splits = section.folds
    return splitter


def _shuffling(folds: int, seed: int) -> Any:
    """Return the splitter by default."""
    require("sklearn", "folds without a splitter")
    from sklearn.model_selection import KFold

    return KFold(folds, shuffle=True, random_state=seed % 2**32)


def _split(splitter: Any, rows: int, seed: int, arrays: Sequence[_PerRow]) -> list[Fold]:
    """Return the folds of a splitter. Without a `random_state`, it uses the seed."""
    with warnings.catch_warnings(), temporary_seed(seed):
        warnings.filterwarnings("ignore", "The groups parameter is ignored")  # by splitters without groups
        parts = list(splitter.split(np.zeros(rows), *arrays))
    return [Fold(*(np.sort(np.asarray(numbers, np.int64)) for numbers in part)) for part in parts]


def _per_row(dataset: Any, method: str, rows: int) -> _PerRow:
    """Return the array of a method of a dataset, or None if there is no such method."""
    values = np.asarray(getattr(dataset, method)()) if hasattr(dataset, method) else None
    if values is not None and values.shape[:1] != (rows,):
        title = f"{type(dataset).__name__}.{method}() returned an array of shape {values.shape}"
        raise DatasetError(f"{title}; datasets.train has {rows} rows, and it must return one item for each")
    return values


def _check_same_rows(train: Any, val: Any, rows: int, arrays: Sequence[_PerRow]) -> None:
    """Refuse a dataset that has different rows in evaluation mode, like the test set of MNIST."""
    if rows_of(val, "val") != rows or not all(
        np.array_equal(np.asarray(_per_row(val, name, rows)), np.asarray(before))
        for name, before in zip(PER_ROW, arrays, strict=True)
    ):
        cls = type(train).__name__
        raise DatasetError(
            f"cfg.cross_validation cannot read the held-out rows through {cls} in evaluation mode, which has other "
            f"rows than datasets.train. Give {cls} an argument training: bool that only turns off augmentation"
        )


def _class_name(node: Mapping[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _switches(node: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a dataset that select its evaluation mode if they are False."""
    values = {item.name: item.default for item in parameters(object_at(node["_target_"])) or []} | dict(node)
    found = [name for name in ("training", "augment", "train") if isinstance(values.get(name), bool)]
    return [name for name in found if name != "train"] or found  # `train` often selects the rows as well
