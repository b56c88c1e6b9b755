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
    from mlx_runtime.companions.notebook.links import PRUNE, Link
    from mlx_runtime.companions.sweeps.engines.base import STOP, SweepEngine, SweepEngineClass, Trials
    from mlx_runtime.companions.sweeps.trial import TrialJob, record_end, run_trial
    from mlx_runtime.workers.local import Local

_SWEEPS = "mlx_runtime.companions.sweeps"

__all__ = [
    "PRUNE",
    "STOP",
    "Cluster",
    "Engine",
    "EngineClass",
    "Group",
    "Job",
    "Link",
    "Local",
    "Remote",
    "SweepEngine",
    "SweepEngineClass",
    "Topology",
    "TrialJob",
    "Trials",
    "WorkerJob",
    "changing_size",
    "load_results",
    "lost",
    "record_end",
    "run_trial",
    "run_worker",
    "this_machine",
    "train_to",
]

__getattr__ = imports_on_use(
    __name__,
    {
        **dict.fromkeys(("STOP", "SweepEngine", "SweepEngineClass", "Trials"), f"{_SWEEPS}.engines.base"),
        **dict.fromkeys(("TrialJob", "record_end", "run_trial"), f"{_SWEEPS}.trial"),
        **dict.fromkeys(("PRUNE", "Link"), "mlx_runtime.companions.notebook.links"),
        "Local": "mlx_runtime.workers.local",
    },
)
