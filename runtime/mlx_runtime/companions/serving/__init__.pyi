# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.loading import load_predictor as load_predictor
from mlx_runtime.companions.serving.predictor import PredictError as PredictError
from mlx_runtime.companions.serving.predictor import Predictor as Predictor
from mlx_runtime.companions.serving.schema import Column as Column
from mlx_runtime.companions.serving.schema import RowError as RowError
from mlx_runtime.companions.serving.schema import Schema as Schema
from mlx_runtime.companions.serving.server import serve as serve
