# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.exports import load_export as load_export
from mlx_runtime.companions.serving.http import serve as serve
from mlx_runtime.companions.serving.loading import by_preference as by_preference
from mlx_runtime.companions.serving.loading import choose_checkpoint as choose_checkpoint
from mlx_runtime.companions.serving.loading import load_parts as load_parts
from mlx_runtime.companions.serving.loading import load_predictor as load_predictor
from mlx_runtime.companions.serving.loading import shard_of as shard_of
from mlx_runtime.companions.serving.predictor import Outputs as Outputs
from mlx_runtime.companions.serving.predictor import PredictError as PredictError
from mlx_runtime.companions.serving.predictor import Predictor as Predictor
from mlx_runtime.companions.serving.predictor import part_of as part_of
from mlx_runtime.companions.serving.predictor import rows_in as rows_in
from mlx_runtime.companions.serving.schema import STRING as STRING
from mlx_runtime.companions.serving.schema import TYPES as TYPES
from mlx_runtime.companions.serving.schema import Column as Column
from mlx_runtime.companions.serving.schema import RowError as RowError
from mlx_runtime.companions.serving.schema import Schema as Schema
