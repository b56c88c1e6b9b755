# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.loading import load_predictor as load_predictor
from mlx_runtime.companions.serving.predictor import Predictor as Predictor
