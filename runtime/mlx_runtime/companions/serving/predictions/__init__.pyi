# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.predictions.offline import Options as Options
from mlx_runtime.companions.serving.predictions.offline import predict as predict
