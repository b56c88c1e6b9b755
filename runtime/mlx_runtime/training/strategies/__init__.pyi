# Written by runtime/stubs.py.
from mlx_runtime.training.strategies.aliasing import alias as alias
from mlx_runtime.training.strategies.aliasing import raw as raw
from mlx_runtime.training.strategies.base import Strategy as Strategy
from mlx_runtime.training.strategies.base import StrategyClass as StrategyClass
from mlx_runtime.training.strategies.blocks import blocks_of as blocks_of
from mlx_runtime.training.strategies.blocks import repeated_blocks as repeated_blocks
from mlx_runtime.training.strategies.blocks import select_modules as select_modules
from mlx_runtime.training.strategies.blocks import without_shared as without_shared
from mlx_runtime.training.strategies.building import allocate as allocate
from mlx_runtime.training.strategies.building import build_models as build_models
from mlx_runtime.training.strategies.building import check_values as check_values
from mlx_runtime.training.strategies.building import deferred_models as deferred_models
from mlx_runtime.training.strategies.building import initialize as initialize
from mlx_runtime.training.strategies.building import place as place
from mlx_runtime.training.strategies.ddp import DDP as DDP
from mlx_runtime.training.strategies.recomputation import recompute_blocks as recompute_blocks
from mlx_runtime.training.strategies.selection import own_strategies as own_strategies
from mlx_runtime.training.strategies.selection import problems as problems
from mlx_runtime.training.strategies.selection import strategy_class as strategy_class
from mlx_runtime.training.strategies.selection import strategy_of as strategy_of
STRATEGIES: dict[str, str]
