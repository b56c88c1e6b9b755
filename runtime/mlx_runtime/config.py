"""`TrainConfig`: the settings that every experiment has, whatever it trains. `DataConfig`: those of every data job."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mlx_runtime.trackers import TensorBoard

EngineName = Literal["in_process", "local", "ray"]
"""What starts the workers of a run; `in_process` starts none."""


@dataclass
class TrainConfig:
    """Settings of a run, `cfg` in conf.yaml. Add your own by inheriting in `src/config.py`.

    Attributes:
        name: experiment name, the folder of its runs in the storage.
        resume: `auto` goes on with the latest run of this name unless it has succeeded, and starts a new one when there
            is none; `latest`, `run_003`, `name/run_003`, a path or a URI goes on with that run; None starts a new one.
        restore_checkpoint_path: checkpoint folder or URI that a new run goes on from, or None to start fresh.
        restore_strict: everything must fit that checkpoint; `false` takes over the weights that fit, names the others,
            and begins all else anew.
        start_epoch: first epoch; the runtime sets it when a checkpoint is restored.
        num_epochs: epochs in all, so a run restored at epoch 3 of 10 trains 7 more.
        engine: what starts the workers: `local` forks them on this machine; `ray` has Ray place them, on a cluster or
            on one that is embedded here; `auto` is `local` on one machine unless only Ray can train the run.
        start_workers: DDP workers; 0 trains inside this process, where a debugger works.
        min_workers: with so many workers the run still goes on when nodes are lost; None means `start_workers`.
        max_workers: up to so many workers join when the cluster has room; None means `start_workers`.
        keep_global_batch: with fewer workers than `start_workers`, gradients of several steps are accumulated, so that
            each update sees as many rows as before; for loops that call `self.backward` and `self.optimizer_step`.
        max_failures: how often lost workers are replaced before the run fails; -1 means always.
        hang_timeout_s: seconds without a step after which workers that wait for each other are told about, and the run
            fails.
        limit_batches: batches of each pass over any set, per worker; None reads all. For a quick look.
        overfit_batches: so many batches of each training set, the same in the same order in every epoch, and of each
            other set; a model that learns nothing from them has a bug.
        profile: rank 0 traces a few training steps, for Perfetto and TensorBoard.
        prefetch_batches: batches that each reading process of a loader prepares ahead.
        loader: how samples of datasets that are not prepared are read: `auto` in the worker itself, `workers=N` by N
            processes beside each worker, `ray` by processes on spare CPUs of the whole cluster (`ray=N`: N per worker).
        prepared: `auto` reads prepared sets where they fit code, arguments and data; `make` prepares those that are
            missing first (`--prepare-batches`); `never` reads samples (`--no-prepared`).
        prepared_path: folder or URI of prepared sets; None means `.prepared` in the storage.
        prepared_max_days: days after which an unused prepared set is removed, whenever others are made.
        prepared_max_gb: size of all prepared sets above which those unused longest are removed then.
        precision: `bf16` or `fp16` runs the models' forward in autocast of that type, and returns float32.
        accumulate_grad_batches: steps whose gradients make one update, for loops that call `self.backward` and
            `self.optimizer_step`.
        gradient_clip: greatest norm of an optimizer's gradients, for loops that call `self.optimizer_step`; None leaves
            them as they are.
        compile: compiles the models: true, or the name of a backend of `torch.compile`.
        deterministic: torch uses algorithms that give the same numbers each time, or refuses; slower on GPUs.
        seed: seeds Python, NumPy and torch on every worker, and the order of the data.
        storage_path: folder for runs, relative to the experiment; `MLX_STORAGE` overrides it.
        log_every_steps: training steps between two reductions of the metrics over the workers.
        watch_gradients: updates between two records of each layer's norms of gradient and weights; 0 means none. Where
            matplotlib is installed, each epoch has a picture of them in TensorBoard.
        stop_on_nan: looks at all gradients before each update, and ends the run at the first that is not finite.
        trackers: where numbers go beside the run's own `metrics.jsonl`, by name: those of `mlx_runtime.trackers`, or
            any class of yours, as in `mlx_runtime.callbacks`; `null` takes one out.
        callbacks: what else listens to a run, in the driver: any class of yours, as in `mlx_runtime.callbacks`.
        monitor: metric that decides which checkpoint is best, like `val/accuracy`; None keeps the newest.
        mode: whether a `max` or a `min` of `monitor` is best.
        checkpoint_every_steps: training steps between two checkpoints in the middle of an epoch, or None for only
            those that the loop saves.
        keep_checkpoints: checkpoints kept per run: the best by `monitor`, and always the latest.
        cpus_per_worker: CPU cores and torch threads of each worker.
        runtime_env: what jobs on a cluster need beside the uploaded files, as Ray's runtime environments have it:
            `{"pip": [...], "env_vars": {...}}`.
        secrets: names of environment variables that must be set on every node of a cluster, like `WANDB_API_KEY`.
        use_gpu: one GPU per worker; None means when this machine or cluster has one.
    """

    name: str = "experiment"
    resume: str | None = None
    restore_checkpoint_path: str | None = None
    restore_strict: bool = True
    start_epoch: int = 0
    num_epochs: int = 10
    engine: Literal["auto", "local", "ray"] = "auto"
    start_workers: int = 2
    min_workers: int | None = None
    max_workers: int | None = None
    keep_global_batch: bool = False
    max_failures: int = 3
    hang_timeout_s: float = 600
    limit_batches: int | None = None
    overfit_batches: int | None = None
    profile: bool = False
    prefetch_batches: int = 2
    loader: str = "auto"
    prepared: Literal["auto", "make", "never"] = "auto"
    prepared_path: str | None = None
    prepared_max_days: float = 30
    prepared_max_gb: float = 200
    seed: int = 0
    precision: Literal[32, "bf16", "fp16"] = 32
    accumulate_grad_batches: int = 1
    gradient_clip: float | None = None
    compile: bool | str = False
    deterministic: bool = False
    storage_path: str = "runs"
    log_every_steps: int = 50
    watch_gradients: int = 0
    stop_on_nan: bool = False
    trackers: dict[str, Any] = field(default_factory=lambda: {"tensorboard": TensorBoard()})
    callbacks: dict[str, Any] = field(default_factory=dict)
    monitor: str | None = None
    mode: Literal["max", "min"] = "min"
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 3
    cpus_per_worker: int = 1
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool | None = None


@dataclass
class DataConfig:
    """Settings of a data job, `cfg` in conf.yaml. Add your own by inheriting in `src/job.py`.

    Attributes:
        name: of the job.
        path: folder in the storage that the job fills; None means `data/<name>`.
        overwrite: replace what an earlier data job left in that folder, once this one is done; else a job refuses to.
        start_workers: tasks at a time; 0 works inside this process, where a debugger works.
        cpus_per_worker: CPU cores of each task.
        runtime_env: as for training.
        secrets: as for training.
        use_gpu: one GPU for each task.
        storage_path: the storage, relative to the data job; `MLX_STORAGE` overrides it.
    """

    name: str = "data"
    path: str | None = None
    overwrite: bool = False
    start_workers: int = 2
    cpus_per_worker: int = 1
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool = False
    storage_path: str = "storage"

    # What a cluster is asked for besides; tasks are not a group that must be complete.
    engine: ClassVar[str] = "ray"
    min_workers: ClassVar[int | None] = None
    max_workers: ClassVar[int | None] = None


def base_of(experiment: type) -> type:
    """The class that says which settings the runtime reads: `TrainConfig`, or `DataConfig` of a data job."""
    return DataConfig if getattr(experiment, "CONFIG", "") == DataConfig.__name__ else TrainConfig
