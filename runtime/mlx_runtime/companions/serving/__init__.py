"""Answers of a trained model: predictions for datasets and files, exports, and servers."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands",
    exports="load_export",
    http="serve",
    loading="by_preference choose_checkpoint load_parts load_predictor problem_of_predict refuse_function shard_of",
    predictor="Outputs PredictError Predictor as_array part_of rows_in",
    schema="STRING TYPES Column RowError Schema",
)
