"""How a model is spread over the workers of a run.

ddp   every worker holds the whole model, and gradients are averaged
"""

from mlx_runtime.training.strategies.base import Strategy
from mlx_runtime.training.strategies.ddp import DDP

__all__ = ["DDP", "Strategy"]
