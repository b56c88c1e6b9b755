from dataclasses import dataclass


@dataclass
class TrainConfig:
    name: str = "experiment 1"
    restore_checkpoint_path: str | None = None
    start_epoch: int = 0
    num_epochs: int = 2
    start_workers: int = 3
    prefetch_batches: int = 2
