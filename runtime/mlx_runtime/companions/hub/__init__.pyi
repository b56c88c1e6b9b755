# Written by runtime/stubs.py.
from mlx_runtime.companions.hub.contents import SweepSummary as SweepSummary
from mlx_runtime.companions.hub.datasets import Batched as Batched
from mlx_runtime.companions.hub.datasets import adopt_dataset as adopt_dataset
from mlx_runtime.companions.hub.datasets import batch_size_cure as batch_size_cure
from mlx_runtime.companions.hub.datasets import loading_lock as loading_lock
from mlx_runtime.companions.hub.pushing import push as push
from mlx_runtime.companions.hub.screening import screen as screen
