"""`Job`: what the driver sends to each worker."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.data.prepared import PreparedSet
from mlx_runtime.runs.folder import RunFolder, run_folder
from mlx_runtime.training.options import EngineName


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to take part in a run. It is pickled, so all of it is plain data.

    Attributes:
        experiment: Import path of the experiment's class.
        tree: Resolved conf.yaml of the run.
        shown: The same without secrets.
        root, name, run: Names of the storage, the experiment and the run.
        attempt: Number of the driver; it is higher when another driver has taken over the run.
        project: Folder of the experiment.
        engine: Name of the engine that starts the workers.
        preemptible: True if the cluster may announce the preemption of a node.
        verbose: True to let Ray print.
        prepared: Prepared datasets by name; they are read instead of the datasets themselves.
        address, key: Address and key of the driver's `Receiver`.
        evaluate: True to run `eval_loop` instead of `worker_loop`.
    """

    experiment: str
    tree: dict[str, Any]
    shown: dict[str, Any]
    root: str
    name: str
    run: str
    attempt: int
    project: Path
    engine: EngineName
    preemptible: bool
    verbose: bool
    prepared: dict[str, PreparedSet]
    address: tuple[str, int] | None = None
    key: bytes = b""
    evaluate: bool = False

    @property
    def folder(self) -> RunFolder:
        """The run folder on this machine."""
        return run_folder(self.root, self.name, self.run)
