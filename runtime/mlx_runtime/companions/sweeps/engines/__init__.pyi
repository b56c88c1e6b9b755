# Written by runtime/stubs.py.
from mlx_runtime.companions.sweeps.engines.base import STOP as STOP
from mlx_runtime.companions.sweeps.engines.base import SweepEngine as SweepEngine
from mlx_runtime.companions.sweeps.engines.base import SweepEngineClass as SweepEngineClass
from mlx_runtime.companions.sweeps.engines.base import Trials as Trials
from mlx_runtime.companions.sweeps.engines.cluster import OnCluster as OnCluster
from mlx_runtime.companions.sweeps.engines.local import Local as Local
