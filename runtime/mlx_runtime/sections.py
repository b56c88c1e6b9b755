"""Sections of `cfg`: rarely changed settings, grouped below keys.

A config class changes the defaults of a whole section: `sharding: Sharding = Sharding(shard_size=2)`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


def at_least(minimum: float, default: Any) -> Any:
    """Return the field of a setting with a minimum."""
    return field(default=default, metadata={"minimum": minimum})


class Section:
    """Base class of the settings below one key of `cfg`. They are frozen, since defaults are shared."""


@dataclass(frozen=True)
class CrossValidation(Section):
    """Training without one of several folds of the rows, which is held out for validation.

    Attributes:
        folds: number of folds into which `datasets.train` is split; one of them is held out, and replaces
            `datasets.val`. `mlx train sweep --folds` trains with each one held out; None means no cross-validation.
        fold: number of the fold whose rows are held out, from 0.
        splitter: splitter of `sklearn.model_selection`, or a class with the same methods; labels and groups come from
            the methods `fold_labels` and `fold_groups` of the dataset. None means `KFold`, shuffled by `seed`.
    """

    folds: int | None = at_least(2, None)
    fold: int | None = at_least(0, None)
    splitter: Any = None


@dataclass(frozen=True)
class Debug(Section):
    """Quick looks at a run, and tools for finding bugs.

    Attributes:
        limit_batches: maximum number of batches per pass over any dataset, per worker; None means no limit.
        overfit_batches: read only this many batches of each dataset, training datasets in the same order every epoch;
            a model that does not fit them has a bug.
        stop_on_nan: check all gradients before each update, and end the run at the first NaN or infinity.
    """

    limit_batches: int | None = at_least(1, None)
    overfit_batches: int | None = at_least(1, None)
    stop_on_nan: bool = False


@dataclass(frozen=True)
class Elastic(Section):
    """Workers that are lost, replaced or added while a run trains.

    Attributes:
        min_workers: minimum number of workers to continue with when nodes are lost; None means `start_workers`.
        max_workers: maximum number of workers when the cluster has room; None means `start_workers`.
        wait_s: seconds to wait until a cluster has grown to `start_workers`, before training begins with fewer.
        max_failures: number of times that lost workers are replaced before the run fails; -1 means no limit.
        keep_global_batch: with fewer workers than `start_workers`, accumulate gradients over several steps, so that
            each update covers as many rows; for loops that call `self.backward` and `self.optimizer_step`.
        hang_timeout_s: seconds without a step after which workers that wait for each other count as deadlocked, and the
            run fails.
    """

    min_workers: int | None = at_least(1, None)
    max_workers: int | None = at_least(1, None)
    wait_s: float = at_least(0, 60)
    max_failures: int = at_least(-1, 3)
    keep_global_batch: bool = False
    hang_timeout_s: float = at_least(1, 600)


@dataclass(frozen=True)
class Fragments(Section):
    """Models cut into consecutive stages, one per worker, by `strategy=pipeline`.

    Attributes:
        stages: number of workers that hold one replica of the models together; None means all of them.
        plan: file of `mlx train clusterize` with the pipelines and the blocks of each stage, for `join`; None
            means stages of about equal numbers of parameters.
        microbatches: number of parts into which each batch is split, so that stages work at the same time.
        traffic: type in which activations and gradients travel between stages; None means their own.
    """

    stages: int | None = at_least(1, None)
    plan: str | None = None
    microbatches: int = at_least(1, 4)
    traffic: Literal["bf16", "fp16"] | None = None


@dataclass(frozen=True)
class Hub(Section):
    """The mirror of a run on the Hugging Face Hub.

    Attributes:
        mirror: repository to which the run is mirrored while it trains, like `hf://user/name`.
        timeout_s: maximum wait for the last upload at the end of a run, in seconds.
    """

    mirror: str | None = None
    timeout_s: float = at_least(0, 60)


@dataclass(frozen=True)
class Preparation(Section):
    """Prepared datasets: batches that are computed before training, and mapped into memory.

    Attributes:
        mode: `auto` reads prepared datasets that match code, arguments and data; `make` prepares missing ones first
            (`--prepare-batches`); `never` reads samples (`--no-prepared`).
        path: folder or URI of prepared datasets; None means `.prepared` in the storage.
        max_gb: maximum total size of prepared datasets; the least recently used are removed first.
    """

    mode: Literal["auto", "make", "never"] = "auto"
    path: str | None = None
    max_gb: float = at_least(0, 200)


@dataclass(frozen=True)
class Replicas(Section):
    """Replicas of the models that train on their own, and are averaged from time to time.

    Attributes:
        every: updates of each replica between two averages; None averages the gradients of every step instead.
        lr: learning rate of the outer optimizer; 1 without momentum sets the weights to the mean of the replicas.
        momentum: Nesterov momentum of the outer optimizer.
        traffic: compression of what is averaged; None means uncompressed. `powersgd` is for gradients only.
    """

    every: int | None = at_least(1, None)
    lr: float = at_least(0, 1.0)
    momentum: float = at_least(0, 0.0)
    traffic: Literal["fp16", "powersgd"] | None = None


@dataclass(frozen=True)
class Sharding(Section):
    """Sharding of models by `cfg.strategy`.

    Attributes:
        shard_size: number of workers that share a replica, a divisor of their total; None means all.
        offload: `cpu` keeps sharded parameters, gradients and optimizer states in the memory of the host.
    """

    shard_size: int | None = at_least(1, None)
    offload: Literal["none", "cpu"] = "none"


@dataclass(frozen=True)
class Tuning(Section):
    """Which parameters of one model train. `*` in a pattern matches any text in the name of a parameter, dots included.

    Attributes:
        freeze: patterns of parameters that do not train.
        unfreeze: passes over the training data, which are epochs in most loops, after which parameters that match a
            pattern train, although they are frozen; 0 for exceptions.
        learning_rates: learning rates of parameters that match a pattern, in place of that of their optimizer.
        layer_decay: factor of the other learning rates per layer below the last one.
        save: `trained` leaves parameters that never train out of checkpoints; their constructor must build them again.
    """

    freeze: tuple[str, ...] = ()
    unfreeze: dict[str, int] = field(default_factory=dict)
    learning_rates: dict[str, float] = field(default_factory=dict)
    layer_decay: float | None = None
    save: Literal["all", "trained"] = "all"


Rule = (
    dict[Literal["map"], dict[str, str]]
    | dict[Literal["drop", "fresh"], str]
    | dict[Literal["slice", "pad"], dict[str, int]]
)


@dataclass(frozen=True)
class Transfer(Section):
    """Weights of one model from elsewhere.

    Attributes:
        source: a run, a checkpoint, a file or a repository; the mean of several is taken.
        model: model in sources that have several; by default, the one of the same name.
        rules: rules for tensors by patterns of their names; the first one that matches counts.
        pinned: sources with the SHA-256 of their content, by the name that the user gave; written by the runtime.
    """

    source: str | tuple[str, ...]
    model: str | None = None
    rules: tuple[Rule, ...] = ()
    pinned: dict[str, str] = field(default_factory=dict)


OF_MODELS = {"transfer": Transfer, "tuning": Tuning}
"""Classes of the sections that `cfg` has for each model, by its name. Files do not name them."""
