# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.exported import load_export as load_export
from mlx_runtime.companions.serving.loading import load_predictor as load_predictor
from mlx_runtime.companions.serving.predictor import Predictor as Predictor
from mlx_runtime.companions.serving.server import serve as serve
