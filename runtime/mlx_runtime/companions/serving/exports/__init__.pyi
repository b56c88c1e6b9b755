# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.exports.artifact import export as export
from mlx_runtime.companions.serving.exports.exported import EXPORT as EXPORT
from mlx_runtime.companions.serving.exports.exported import load_export as load_export
