"""What follows when the driver of a launched job ends: one rule for jobs of every scheme.

A job on Ray retries and requeues within itself (`ray.supervision`), Slurm requeues the job (`slurm.requeue`), and
KubeRay starts a RayJob again if it fails (`kubernetes.driver`).
"""

import signal
from dataclasses import dataclass
from typing import Literal

from mlx_runtime.runs import records

TERMINATED = 128 + signal.SIGTERM
"""Exit code of drivers that were stopped."""


@dataclass(frozen=True)
class DriverEnd:
    """How a driver has ended, and how it left its run.

    Attributes:
        code: exit code of the process; -N if signal N killed it.
        status: status of the run by its record; PENDING if the driver had not claimed it, and RUNNING if it had, but
            had not recorded that.
        asked: reason for which the run was asked to stop, if it was.
        saved: the driver has saved a checkpoint.
    """

    code: int
    status: str
    asked: str | None = None
    saved: bool = False

    @property
    def next(self) -> Literal["done", "retry", "requeue"]:
        """What follows.

        retry    another driver, a limited number of times: this one died, or was preempted before it had progressed
        requeue  another driver: this one was preempted, and saved a checkpoint first
        done     nothing: errors of user code and of the config would be repeated, and users who stop a run want it to
                 stay stopped
        """
        if self.code == TERMINATED and self.status == "STOPPED":
            if self.asked not in (None, signal.SIGTERM.name):
                return "done"
            return "requeue" if self.saved else "retry"
        unrecorded = self.code == 1 and self.status in ("WAITING", "RUNNING")
        died = self.code < 0 and self.code != -signal.SIGINT and self.status in records.LIVING
        return "retry" if unrecorded or died else "done"

    @property
    def exit_code(self) -> int:
        """The exit code of the job. Native libraries may crash a driver as it exits, after it has recorded its end."""
        if self.code < 0 and self.status not in records.LIVING:
            return {"SUCCEEDED": 0, "PRUNED": 0, "STOPPED": TERMINATED}.get(self.status, 1)
        return self.code if self.code >= 0 else 128 - self.code
