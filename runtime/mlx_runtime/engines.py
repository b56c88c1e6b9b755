"""What engines of your own are made of: see the guide "Extending mlx"."""

from mlx_runtime.distributed.topology import Topology
from mlx_runtime.training.connections import Remote
from mlx_runtime.training.engines.base import Cluster, Job, lost
from mlx_runtime.training.engines.placement import changing_size, this_machine
from mlx_runtime.training.engines.protocol import Engine, EngineClass, Group
from mlx_runtime.training.engines.worker import WorkerJob, load_results, run_worker
from mlx_runtime.training.worker import train_to

__all__ = [
    "Cluster",
    "Engine",
    "EngineClass",
    "Group",
    "Job",
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
