"""Building blocks for custom engines; see the guide "Extending mlx"."""

from typing import TYPE_CHECKING

from mlx_runtime.distributed.topology import Topology
from mlx_runtime.importing import imports_on_use
from mlx_runtime.loop.job import Cluster, Job, lost
from mlx_runtime.workers.connections import Remote
from mlx_runtime.workers.placement import changing_size, this_machine
from mlx_runtime.workers.process import WorkerJob, load_results, run_worker
from mlx_runtime.workers.protocol import Engine, EngineClass, Group
from mlx_runtime.workers.worker import train_to

if TYPE_CHECKING:
    from mlx_runtime.workers.local import Local

__all__ = [
    "Cluster",
    "Engine",
    "EngineClass",
    "Group",
    "Job",
    "Local",
    "Remote",
    "Topology",
    "WorkerJob",
    "changing_size",
    "load_results",
    "lost",
    "run_worker",
    "this_machine",
    "train_to",
]

__getattr__ = imports_on_use(__name__, {"Local": "mlx_runtime.workers.local"})
