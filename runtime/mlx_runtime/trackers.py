"""Where numbers go: the trackers that conf.yaml names under `cfg.trackers`."""

from mlx_runtime.tracking.trackers import CSV, JSONL, MLflow, TensorBoard, WandB

__all__ = ["CSV", "JSONL", "MLflow", "TensorBoard", "WandB"]
