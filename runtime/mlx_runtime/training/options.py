"""Settings that every experiment (`TrainConfig`) and every data job (`DataConfig`) has."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from mlx_runtime.errors import suggest
from mlx_runtime.storage.documents import LARGEST
from mlx_runtime.tracking.callbacks import HOOKS
from mlx_runtime.tracking.trackers import TensorBoard
from mlx_runtime.training.engines import ENGINES


def at_least(minimum: float, default: Any) -> Any:
    """Return the field of a setting with a minimum."""
    return field(default=default, metadata={"minimum": minimum})


class _Checked:
    """Settings whose values have ranges."""

    @staticmethod
    def out_of_range(cfg: Any) -> list[str]:
        """Return one line per setting that is out of range. A `cfg` of a user's own class need not have all of them."""
        problems = []
        for name, minimum in minimums().items():
            value = getattr(cfg, name, None)
            if value is not None and value < minimum:
                problems.append(f"cfg.{name} is {value!r}; the minimum is {minimum}")
            elif value is not None and value >= LARGEST:
                problems.append(f"cfg.{name} is {value!r:.40}; the maximum is {LARGEST - 1}")
        least, most = cfg.min_workers or cfg.start_workers, cfg.max_workers or cfg.start_workers
        if cfg.start_workers != 0 and not least <= cfg.start_workers <= most:
            limits = f"cfg.min_workers={least} and cfg.max_workers={most}"
            problems.append(f"cfg.start_workers is {cfg.start_workers}, not between {limits}")
        engines = ("auto", *(name for name in ENGINES if name != "in_process"))
        if cfg.engine not in engines and "." not in cfg.engine:
            hint = suggest(cfg.engine, engines)
            problems.append(f"cfg.engine is {cfg.engine!r}; write {', '.join(engines)}, or an import path.{hint}")
        problems += _sharding_problems(cfg)
        clip = getattr(cfg, "gradient_clip", None)
        if clip is not None and not clip > 0:  # NaN is refused, too
            problems.append(f"cfg.gradient_clip is {clip!r}; write a norm above 0, or null for no clipping")
        folds, fold, splitter = (getattr(cfg, name, None) for name in ("folds", "fold", "splitter"))
        if (folds is None) != (fold is None):
            problems.append(f"cfg.folds is {folds} and cfg.fold is {fold}; set both, or neither")
        elif folds is not None and fold >= folds:
            problems.append(f"cfg.fold is {fold}; with cfg.folds={folds}, it is from 0 to {folds - 1}")
        if isinstance(splitter, str) or not (splitter is None or hasattr(splitter, "split")):  # a str has `split`, too
            example = "'cfg.splitter={_target_: sklearn.model_selection.StratifiedKFold, shuffle: true}'"
            problems.append(f"cfg.splitter is {splitter!r}; it takes an object that splits rows, like {example}")
        for kind, hooks in HOOKS.items():
            for name, item in (getattr(cfg, kind, None) or {}).items():
                if item is not None and not any(hasattr(item, hook) for hook in hooks):
                    lacks = "no _target_" if type(item) is dict else f"none of the methods {', '.join(hooks)}"
                    problems.append(f"cfg.{kind}.{name} is {item!r:.100}, which has {lacks}")
        start, epochs = (getattr(cfg, name, 0) for name in ("start_epoch", "num_epochs"))
        if 0 < epochs <= start:
            problems.append(f"cfg.start_epoch is {start}, so cfg.num_epochs={epochs} leaves nothing to train; raise it")
        return problems


def _sharding_problems(cfg: Any) -> list[str]:
    """Return one line per setting that contradicts `cfg.strategy`."""
    strategy, size = getattr(cfg, "strategy", "ddp"), getattr(cfg, "shard_size", None)
    problems = []
    if getattr(cfg, "offload", "none") != "none" and strategy == "ddp":
        problems.append("cfg.offload=cpu is for sharded models, and cfg.strategy is ddp; use cfg.strategy=fsdp or hsdp")
    if strategy != "hsdp":
        if size is not None:
            problems.append(f"cfg.shard_size={size} is for cfg.strategy=hsdp, and cfg.strategy is {strategy}")
        return problems
    if size is None:
        cure = "set the number of workers that share one replica of the models, or use cfg.strategy=fsdp"
        return [*problems, f"cfg.strategy=hsdp needs cfg.shard_size; {cure}"]
    for name in ("start_workers", "min_workers", "max_workers"):
        workers = getattr(cfg, name)
        if size > 0 and workers is not None and workers % size:
            below = workers - workers % size
            fitting = f"{below} or {below + size}" if below else str(size)
            problems.append(f"cfg.{name}={workers} is not a multiple of cfg.shard_size={size}; use {fitting}")
    return problems


@dataclass
class TrainConfig(_Checked):
    """Settings of a run, `cfg` in conf.yaml. Add your own by inheriting in `src/config.py`.

    Attributes:
        name: experiment name, and folder of its runs in the storage.
        resume: `auto` resumes the latest run of this name unless it has succeeded, and starts a new one if there is
            none; `latest`, `run_003`, `name/run_003`, a path or a URI resumes that run; None starts a new one. The
            latest run is never one of a sweep, which has its own `--resume`.
        restore_checkpoint_path: folder or URI of a checkpoint that a new run starts from, or the mirror of a run, like
            `hf://user/name` or `hf://user/name/checkpoints/epoch_0004`; None starts from scratch.
        restore_strict: everything must match that checkpoint; `false` loads the weights that match, lists the others,
            and initializes everything else.
        start_epoch: first epoch; set by the runtime when a checkpoint is restored.
        num_epochs: total number of epochs; a run restored after 3 of 10 trains 7 more.
        max_steps: training steps in all epochs and attempts, after which the run ends successfully with a checkpoint,
            even within an epoch. It counts updates, like `global_step`; None means no limit.
        evaluate_every_steps: for loops that call `self.every(self.cfg.evaluate_every_steps)`; None means never.
        engine: starts the workers: `local` as processes on this machine; `ray` on a cluster, or on a Ray embedded
            here; `auto` is `local` on one machine unless only Ray can train the run. The import path of a class names
            an engine of your own.
        start_workers: number of workers; 0 trains in this process, where a debugger works.
        min_workers: minimum number of workers to continue with when nodes are lost; None means `start_workers`.
        max_workers: maximum number of workers when the cluster has room; None means `start_workers`.
        keep_global_batch: with fewer workers than `start_workers`, accumulate gradients over several steps, so that
            each update sees as many rows; for loops that call `self.backward` and `self.optimizer_step`.
        max_failures: how many times lost workers are replaced before the run fails; -1 means no limit.
        hang_timeout_s: seconds without a step after which a deadlock is detected, and the run fails.
        limit_batches: maximum number of batches per pass over any dataset, per worker; None means no limit.
        limit_train_batches: the same for training datasets only.
        limit_eval_batches: the same for all other datasets.
        overfit_batches: read only this many batches of each dataset, training sets in the same order in every epoch;
            a model that does not fit them has a bug.
        folds: train on `datasets.train` without one of this many folds, whose rows take the place of `datasets.val`.
            `mlx train sweep --folds` trains all; None means no cross-validation.
        fold: number of the fold whose rows are held out, from 0.
        splitter: splits the rows into folds: a class of `sklearn.model_selection`, or one with the same methods; labels
            and groups come from the methods `fold_labels` and `fold_groups` of the dataset. None means `KFold`,
            shuffled by `seed`.
        profile: trace a few training steps on rank 0, for Perfetto and TensorBoard. If a GPU runs out of memory, the
            snapshot of its memory then has the lines of code that have allocated it.
        loader: what reads samples of datasets that are not prepared: `auto` the worker itself, `workers=N` N
            processes per worker.
        prefetch_batches: batches that are read while the loop trains on earlier ones. None is 2 for each of the
            processes of `workers=N`, and for streams of Ray Data, and 0 for what the worker itself reads. A number is
            for all of them; a thread of the worker then reads what the worker would, unless the first batch of a pass
            draws from the global random generators: it would change the numbers that the loop draws.
        prepared: `auto` reads prepared datasets that match code, arguments and data; `make` prepares missing ones
            first (`--prepare-batches`); `never` reads samples (`--no-prepared`).
        prepared_path: folder or URI of prepared datasets; None means `.prepared` in the storage.
        prepared_max_days: when preparing, remove prepared datasets not used for this many days.
        prepared_max_gb: maximum total size of prepared datasets; the least recently used are removed first.
        strategy: `ddp` replicates models on all workers, `fsdp` shards them over all workers, and `hsdp` over
            `shard_size` workers, with replicas of the shards; `Models.strategies = {"net": "ddp"}` overrides it.
        shard_size: workers that hold one replica under `hsdp`; it divides the number of workers.
        offload: `cpu` keeps sharded parameters, gradients and optimizer states in the memory of the host.
        activation_checkpointing: recompute activations in the backward pass instead of storing them: true for the
            blocks that repeat, or a pattern of module paths like `layers.*`.
        precision: `bf16` or `fp16` runs each model's `forward` under autocast to that type, and all of a sharded
            model in it; outputs are float32.
        accumulate_grad_batches: steps per update, for loops that call `self.backward` and `self.optimizer_step`.
        gradient_clip: maximum gradient norm of each optimizer, for loops that call `self.optimizer_step`; None does
            not clip.
        compile: compile the models: true, the name of a backend of `torch.compile`, or some of its arguments, like
            `{mode: max-autotune, dynamic: false}`.
        matmul_precision: float32 matrix products on GPUs: `high` runs them on tensor cores, in TF32 with 10 bits of
            mantissa; `highest` in full float32, with 23 bits; `medium` may use bfloat16. Without effect on CPUs.
        deterministic: use deterministic algorithms of torch, or fail if there is none; slower on GPUs.
        seed: seeds Python, NumPy and torch on every worker, and the order of the data.
        storage_path: folder or URI of runs; a relative folder is below the experiment. `MLX_STORAGE` overrides it.
        code_files: files that `code.zip` of a run holds although git does not track them and no code imports them, as
            lines of a .gitignore.
        mirror: repository on the Hugging Face Hub, like `hf://user/name`, that the run is mirrored to while it trains.
        mirror_timeout_s: seconds that the end of a run waits for its last upload.
        log_every_steps: training steps between two reductions of the metrics over all workers.
        watch_gradients: updates between two records of each layer's gradient and weight norms; 0 means none. If
            matplotlib is installed, TensorBoard shows a picture of them for each epoch.
        stop_on_nan: check all gradients before each update, and end the run at the first that is not finite.
        trackers: receive numbers in addition to the run's own `metrics.jsonl`, by name: those of
            `mlx_runtime.trackers`, or any class with the methods listed in `mlx_runtime.tracking.callbacks`; `null`
            removes one.
        callbacks: called in the driver: any class with the same methods, by name.
        monitor: metric that decides which checkpoint is best, like `val/accuracy`; None keeps the newest.
        mode: `max` or `min`: the best value of `monitor`.
        checkpoint_every_steps: training steps between two checkpoints within an epoch; None saves only when the loop
            does.
        keep_checkpoints: number of checkpoints kept per run: the best by `monitor`, and always the latest.
        cpus_per_worker: CPU cores and torch threads per worker.
        runtime_env: additions to the environment of jobs on a cluster, as in Ray:
            `{"pip": [...], "env_vars": {...}}`.
        secrets: names of environment variables that must be set on every node of a cluster, like `WANDB_API_KEY`.
        use_gpu: train on one GPU per worker; None means only if there are enough.
    """

    name: str = "experiment"
    resume: str | None = None
    restore_checkpoint_path: str | None = None
    restore_strict: bool = True
    start_epoch: int = at_least(0, 0)
    num_epochs: int = at_least(0, 10)
    max_steps: int | None = at_least(1, None)
    evaluate_every_steps: int | None = at_least(1, None)
    engine: str = "auto"
    start_workers: int = at_least(0, 2)
    min_workers: int | None = at_least(1, None)
    max_workers: int | None = at_least(1, None)
    keep_global_batch: bool = False
    max_failures: int = at_least(-1, 3)
    hang_timeout_s: float = at_least(1, 600)
    limit_batches: int | None = at_least(1, None)
    limit_train_batches: int | None = at_least(1, None)
    limit_eval_batches: int | None = at_least(1, None)
    overfit_batches: int | None = at_least(1, None)
    folds: int | None = at_least(2, None)
    fold: int | None = at_least(0, None)
    splitter: Any = None
    profile: bool = False
    loader: str = "auto"
    prefetch_batches: int | None = at_least(0, None)
    prepared: Literal["auto", "make", "never"] = "auto"
    prepared_path: str | None = None
    prepared_max_days: float = 30
    prepared_max_gb: float = 200
    seed: int = at_least(0, 0)
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    shard_size: int | None = at_least(1, None)
    offload: Literal["none", "cpu"] = "none"
    activation_checkpointing: bool | str = False
    precision: Literal[32, "bf16", "fp16"] = 32
    accumulate_grad_batches: int = at_least(1, 1)
    gradient_clip: float | None = None
    compile: bool | str | dict[str, Any] = False
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    deterministic: bool = False
    storage_path: str = "runs"
    code_files: tuple[str, ...] = ()
    mirror: str | None = None
    mirror_timeout_s: float = at_least(0, 60)
    log_every_steps: int = at_least(1, 50)
    watch_gradients: int = at_least(0, 0)
    stop_on_nan: bool = False
    trackers: dict[str, Any] = field(default_factory=lambda: {"tensorboard": TensorBoard()})
    callbacks: dict[str, Any] = field(default_factory=dict)
    monitor: str | None = None
    mode: Literal["max", "min"] = "min"
    checkpoint_every_steps: int | None = at_least(1, None)
    keep_checkpoints: int = at_least(1, 3)
    cpus_per_worker: int = at_least(1, 1)
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool | None = None


@dataclass
class DataConfig(_Checked):
    """Settings of a data job, `cfg` in conf.yaml. Add your own by inheriting in `src/job.py`.

    Attributes:
        name: name of the job.
        path: folder in the storage that the job fills; None means `data/<name>`.
        overwrite: replace what an earlier data job left in that folder once this one is done; otherwise, refuse to.
        start_workers: maximum number of concurrent tasks; 0 works in this process, where a debugger works.
        cpus_per_worker: CPU cores per task.
        runtime_env: the same as for training.
        secrets: the same as for training.
        use_gpu: one GPU per task.
        storage_path: folder or URI; a relative folder is below the data job. `MLX_STORAGE` overrides it.
    """

    name: str = "data"
    path: str | None = None
    overwrite: bool = False
    start_workers: int = at_least(0, 2)
    cpus_per_worker: int = at_least(1, 1)
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool = False
    storage_path: str = "storage"

    # Requirements of a cluster beyond those above; tasks are not a group that has to be complete.
    engine: ClassVar[str] = "ray"
    min_workers: ClassVar[int | None] = None
    max_workers: ClassVar[int | None] = None


def minimums() -> dict[str, float]:
    """Return the minimum of each setting that has one."""
    items = (*fields(TrainConfig), *fields(DataConfig))
    return {item.name: item.metadata["minimum"] for item in items if "minimum" in item.metadata}
