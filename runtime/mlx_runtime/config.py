"""`TrainConfig`: the settings that every experiment has, whatever it trains."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class TrainConfig:
    """Settings of a run, `cfg` in conf.yaml. Add your own by inheriting in `src/config.py`.

    Attributes:
        name: experiment name, the folder of its runs in the storage.
        restore_checkpoint_path: checkpoint folder to continue from, or None to start fresh.
        start_epoch: first epoch; the runtime sets it when a checkpoint is restored.
        num_epochs: epochs in all, so a run restored at epoch 3 of 10 trains 7 more.
        start_workers: DDP workers; 0 trains inside this process, where a debugger works.
        prefetch_batches: batches that each reading process of a loader prepares ahead.
        loader: how samples of datasets that are not prepared are read: `auto` in the worker itself, `workers=N` by N
            processes beside each worker, `ray` by processes on spare CPUs of the whole cluster (`ray=N`: N per worker).
        prepared: `auto` reads prepared sets where they fit code, arguments and data; `make` prepares those that are
            missing first (`--prepare-batches`); `never` reads samples (`--no-prepared`).
        prepared_path: folder or URI of prepared sets; None means `.prepared` in the storage.
        prepared_max_days: days after which an unused prepared set is removed, whenever others are made.
        prepared_max_gb: size of all prepared sets above which those unused longest are removed then.
        seed: seeds Python, NumPy and torch on every worker, and the order of the data.
        storage_path: folder for runs, relative to the experiment; `MLX_STORAGE` overrides it.
        log_every_steps: training steps between two reductions of the metrics over the workers.
        monitor: metric that decides which checkpoint is best, like `val/accuracy`; None keeps the newest.
        mode: whether a `max` or a `min` of `monitor` is best.
        keep_checkpoints: checkpoints kept per run: the best by `monitor`, and always the latest.
        cpus_per_worker: CPU cores and torch threads of each worker.
        use_gpu: one GPU per worker; None means when this machine or cluster has one.
    """

    name: str = "experiment"
    restore_checkpoint_path: str | None = None
    start_epoch: int = 0
    num_epochs: int = 10
    start_workers: int = 2
    prefetch_batches: int = 2
    loader: str = "auto"
    prepared: Literal["auto", "make", "never"] = "auto"
    prepared_path: str | None = None
    prepared_max_days: float = 30
    prepared_max_gb: float = 200
    seed: int = 0
    storage_path: str = "runs"
    log_every_steps: int = 10
    monitor: str | None = None
    mode: Literal["max", "min"] = "min"
    keep_checkpoints: int = 3
    cpus_per_worker: int = 1
    use_gpu: bool | None = None
