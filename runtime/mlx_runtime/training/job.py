"""`Job`: what the driver sends to each worker."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.data.sampling import Subset
from mlx_runtime.events import RunInfo
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.training.engines.placement import Cluster

if TYPE_CHECKING:
    from mlx_runtime.data.prepared import PreparedSet


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to take part in a run. It is pickled, so all of it is plain data."""

    experiment: str  # import path of the experiment's class
    tree: dict[str, Any]  # resolved conf.yaml of the run
    run: RunInfo  # its `folder` is a path on the driver's machine
    root: str  # storage that the run is in
    project: Path  # folder of the experiment
    cluster: Cluster
    verbose: bool  # let Ray print
    prepared: "dict[str, PreparedSet]"  # by name of the dataset, which is not read itself
    subsets: dict[str, Subset]  # by name of the dataset; others are read whole
    receiver: tuple[tuple[str, int], bytes]  # address and key of the driver's `Receiver`
    evaluate: bool  # run `eval_loop` instead of `worker_loop`

    @property
    def folder(self) -> RunFolder:
        """The run folder on this machine."""
        return run_folder(self.root, self.run.experiment, self.run.name)
