"""Settings of every experiment."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast

from mlx_runtime import companions
from mlx_runtime.config.constructors.targets import named_class
from mlx_runtime.errors import suggest
from mlx_runtime.sections import (
    CrossValidation,
    Debug,
    Elastic,
    Fragments,
    Hub,
    Preparation,
    Replicas,
    Section,
    Sharding,
    at_least,
)
from mlx_runtime.storage.documents import LARGEST, name_problem
from mlx_runtime.tracking.callbacks import HOOKS
from mlx_runtime.tracking.trackers import TensorBoard

if TYPE_CHECKING:
    from mlx_runtime.loop.strategies import DDP

ENGINES = {
    "in_process": "mlx_runtime.workers.worker.InProcess",
    "local": "mlx_runtime.workers.local.Local",
    "ray": "mlx_runtime.companions.ray.engine.OnRay",
    "torchrun": "mlx_runtime.companions.torchrun.engine.Torchrun",
}
"""Import paths of engine classes by name. Other classes are named by their import path in `cfg.engine`."""

STRATEGIES = {
    "ddp": "mlx_runtime.loop.strategies.DDP",
    "fsdp": "mlx_runtime.companions.sharding.strategy.FSDP",
    "pipeline": "mlx_runtime.companions.fragments.strategy.Pipeline",
    "jax": "mlx_runtime.companions.jax.strategy.JAX",
}
"""Import paths of strategy classes by name. Other classes are named by their import path in `cfg.strategy`."""


@dataclass
class TrainConfig:
    """Settings of a run, `cfg` in conf.yaml. Add your own by inheriting in `src/config.py`.

    Attributes:
        name: experiment name, and folder of its runs in the storage.
        restore_checkpoint_path: folder or URI of a checkpoint that a new run starts from, or the mirror of a run, like
            `hf://user/name` or `hf://user/name/checkpoints/epoch_0004`; None starts from scratch.
        transfer: weights of a new run from elsewhere, by model: settings of `mlx_runtime.sections.Transfer`; everything
            else starts from scratch.
        start_epoch: first epoch; set by the runtime when a checkpoint is restored.
        num_epochs: total number of epochs; a run that resumes after 3 of 10 trains 7 more.
        max_steps: maximum number of training steps, in all epochs and attempts. The run then ends successfully, with a
            checkpoint, even within an epoch. Counts updates, like `global_step`; None means no limit.
        evaluate_every_steps: for loops that call `self.every(self.cfg.evaluate_every_steps)`; None means never.
        engine: starts the workers. `local`: as processes on this machine; `ray`: on a cluster, or in a Ray embedded on
            this machine; `auto`: `torchrun` if that has started this process, else `local` on one machine unless only
            Ray can train the run. May also be the import path of your own engine.
        start_workers: number of workers; 0 trains in this process, where a debugger works.
        loader: reads the samples of datasets that are not prepared. `auto`: the worker itself; `workers=N`: N processes
            per worker.
        prefetch_batches: batches that each reading process of `loader=workers=N` reads ahead of the loop, at least 1;
            None means 2. It starts no process.
        strategy: `ddp` replicates models on all workers; `fsdp` shards them over all workers, or over
            `sharding.shard_size` of them, with replicas; `pipeline` cuts them into stages, one per worker.
            `Models.strategies = {"net": "ddp"}` overrides it. May also be the import path of your own strategy.
        activation_checkpointing: recompute activations in the backward pass instead of storing them: true for repeated
            blocks, or a pattern of module paths like `layers.*`.
        precision: `bf16` or `fp16` runs each model's `forward` under autocast, and all of a sharded model in that type;
            outputs are float32.
        accumulate_grad_batches: steps per update, for loops that call `self.backward` and `self.optimizer_step`.
        gradient_clip: maximum gradient norm of each optimizer, for loops that call `self.optimizer_step`; None does
            not clip.
        compile: compile the models: true, the name of a backend of `torch.compile`, or some of its arguments, like
            `{mode: max-autotune, dynamic: false}`.
        deterministic: use only deterministic algorithms of torch, and fail if there is none; slower on GPUs.
        seed: seeds Python, NumPy and torch on every worker, and the order of the data.
        storage_path: folder or URI of runs; a relative folder is below the experiment. `MLX_STORAGE` overrides it.
        log_every_steps: training steps between two reductions of the metrics over all workers.
        trackers: objects by name that receive the recorded numbers, in addition to `metrics.jsonl`: classes of
            `mlx_runtime.trackers`, or any class with methods of `mlx_runtime.tracking.callbacks`; `null` removes one.
        callbacks: objects by name with the same methods, called in the driver.
        monitor: metric by which the best checkpoints are chosen, like `val/accuracy`; None keeps the newest ones.
        mode: `max` or `min`, whether larger or smaller values of `monitor` are better.
        checkpoint_every_steps: training steps between two checkpoints within an epoch; with None, only the loop saves
            checkpoints.
        keep_checkpoints: number kept per run: the best by `monitor`, and always the latest; with 0, none after success.
        cpus_per_worker: CPU cores and torch threads per worker.
        runtime_env: additions to the environment of jobs on a cluster, as in Ray:
            `{"pip": [...], "env_vars": {...}}`.
        secrets: names of environment variables that must be set on every node of a cluster, like `WANDB_API_KEY`.
        use_gpu: train on GPUs; None means only if there are enough.
        gpus_per_worker: GPUs per worker, if it trains on GPUs. With several, the loop distributes the model over them.
        cross_validation: one fold of a cross-validation.
        debug: quick looks and debugging.
        elastic: workers that are lost, replaced or added while a run trains.
        fragments: models cut into stages by `strategy=pipeline`.
        hub: the mirror of the run on the Hugging Face Hub.
        preparation: datasets that are prepared before training.
        replicas: replicas of the models that are averaged from time to time.
        sharding: sharding of models by `strategy`.
        tuning: which parameters of a model train, by its name: settings of `mlx_runtime.sections.Tuning`.
    """

    name: str = "experiment"
    restore_checkpoint_path: str | None = None
    transfer: dict[str, Any] | None = None
    start_epoch: int = at_least(0, 0)
    num_epochs: int = at_least(0, 10)
    max_steps: int | None = at_least(1, None)
    evaluate_every_steps: int | None = at_least(1, None)
    engine: str = "auto"
    start_workers: int = at_least(0, 2)
    loader: str = "auto"
    prefetch_batches: int | None = at_least(0, None)
    seed: int = at_least(0, 0)
    strategy: str = "ddp"
    activation_checkpointing: bool | str = False
    precision: Literal[32, "bf16", "fp16"] = 32
    accumulate_grad_batches: int = at_least(1, 1)
    gradient_clip: float | None = None
    compile: bool | str | dict[str, Any] = False
    deterministic: bool = False
    storage_path: str = "runs"
    log_every_steps: int = at_least(1, 50)
    trackers: dict[str, Any] = field(default_factory=lambda: {"tensorboard": TensorBoard()})
    callbacks: dict[str, Any] = field(default_factory=dict)
    monitor: str | None = None
    mode: Literal["max", "min"] = "min"
    checkpoint_every_steps: int | None = at_least(1, None)
    keep_checkpoints: int = at_least(0, 3)
    cpus_per_worker: int = at_least(1, 1)
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool | None = None
    gpus_per_worker: int = at_least(1, 1)
    cross_validation: CrossValidation = CrossValidation()
    debug: Debug = Debug()
    elastic: Elastic = Elastic()
    fragments: Fragments = Fragments()
    hub: Hub = Hub()
    preparation: Preparation = Preparation()
    replicas: Replicas = Replicas()
    sharding: Sharding = Sharding()
    tuning: dict[str, Any] | None = None

    @staticmethod
    def out_of_range(cfg: Any) -> list[str]:
        """Return one line per setting that is out of range; `cfg` may be of another class with all these settings."""
        problems = [item for item in [name_problem("cfg.name", cfg.name)] if item]
        for name, minimum in minimums().items():
            value = attrgetter(name)(cfg)
            if value is not None and value < minimum:
                problems.append(f"cfg.{name} is {value!r}; the minimum is {minimum}")
            elif value is not None and value >= LARGEST:
                problems.append(f"cfg.{name} is {value!r:.40}; the maximum is {LARGEST - 1}")
        least, most = (size or cfg.start_workers for size in (cfg.elastic.min_workers, cfg.elastic.max_workers))
        if cfg.start_workers != 0 and not least <= cfg.start_workers <= most:
            limits = f"cfg.elastic.min_workers={least} and cfg.elastic.max_workers={most}"
            problems.append(f"cfg.start_workers is {cfg.start_workers}, not between {limits}")
        engines = ("auto", *(name for name in ENGINES if name != "in_process"))
        problems += _name_problems("engine", cfg.engine, engines)
        problems += _name_problems("strategy", cfg.strategy, STRATEGIES)
        clip = cfg.gradient_clip
        if clip is not None and not clip > 0:  # NaN is refused, too
            problems.append(f"cfg.gradient_clip is {clip!r}; write a norm above 0, or null for no clipping")
        if cfg.transfer:
            problems += companions.part("surgery.rules").problems(cfg)
        if find_spec("torch") is not None:  # otherwise, the job checks the rest
            if cfg.strategy in STRATEGIES or "." in cfg.strategy:
                problems += strategy_problems(cfg)
            if cfg.cross_validation != CrossValidation():
                from mlx_runtime.data import folds

                problems += folds.problems(cfg.cross_validation)
            if cfg.tuning:
                problems += companions.part("surgery.tuning").problems(cfg)
        for kind, hooks in HOOKS.items():
            for name, item in getattr(cfg, kind).items():
                if item is not None and not any(hasattr(item, hook) for hook in hooks):
                    lacks = "no _target_" if type(item) is dict else f"none of the methods {', '.join(hooks)}"
                    problems.append(f"cfg.{kind}.{name} is {item!r:.100}, which has {lacks}")
        if 0 < cfg.num_epochs <= cfg.start_epoch:
            epochs = f"cfg.num_epochs={cfg.num_epochs}"
            problems.append(f"cfg.start_epoch is {cfg.start_epoch}, so {epochs} leaves nothing to train; raise it")
        return problems


def minimums() -> dict[str, float]:
    """Return the minimum of each setting that has one, by its key below `cfg`."""
    items = {item.name: item for item in fields(TrainConfig)}
    for name, section in [(name, item.default) for name, item in items.items() if isinstance(item.default, Section)]:
        items |= {f"{name}.{item.name}": item for item in fields(cast(Any, section))}
    return {name: item.metadata["minimum"] for name, item in items.items() if "minimum" in item.metadata}


def _name_problems(setting: str, name: str, known: Iterable[str]) -> list[str]:
    """Return a line if a setting is neither a known word nor an import path."""
    if name in known or "." in name:
        return []
    return [f"cfg.{setting} is {name!r}; write {', '.join(known)}, or an import path.{suggest(name, known)}"]


def strategy_class(name: str) -> "type[DDP]":
    """Return the class of a strategy, given its name or import path; raise ConfigError if there is none."""
    needs = ("refusal", "multiple_of", "model_parallel_size", "build", "consolidate")
    found: type[DDP] = named_class("strategy", name, STRATEGIES, needs)
    return found


def strategy_problems(cfg: Any) -> list[str]:
    """Return one line per setting that `cfg.strategy` cannot train with."""
    kind = strategy_class(cfg.strategy)
    if reason := kind.refusal(cfg):
        return [f"cfg.strategy={cfg.strategy} cannot train this: {reason}"]
    found: list[str] = companions.part("fragments.replicas").problems(cfg) if cfg.replicas != Replicas() else []
    size = kind.multiple_of(cfg)
    for name in ("start_workers", "elastic.min_workers", "elastic.max_workers"):
        workers = attrgetter(name)(cfg)
        if size > 1 and workers is not None and workers % size:
            needs = f"is not a multiple of {size}, as cfg.strategy={cfg.strategy} needs"
            found.append(f"cfg.{name}={workers} {needs}")
    return found
