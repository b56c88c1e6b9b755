"""Answers of a trained model: predictions for datasets and files, exports, and servers."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands",
    exported="load_export",
    loading="load_predictor",
    predictor="Predictor",
    server="serve",
)
