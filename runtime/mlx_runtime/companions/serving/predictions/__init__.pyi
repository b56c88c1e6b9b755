# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.predictions.offline import Options as Options
from mlx_runtime.companions.serving.predictions.offline import predict as predict
from mlx_runtime.companions.serving.predictions.tables import is_list as is_list
from mlx_runtime.companions.serving.predictions.tables import is_number as is_number
from mlx_runtime.companions.serving.predictions.tables import values_of as values_of
