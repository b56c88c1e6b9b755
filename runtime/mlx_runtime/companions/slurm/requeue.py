"""Put the job of this process back into the queue, after the time limit has ended the driver of its run.

python -m mlx_runtime.companions.slurm.requeue RUN
"""

import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlx_runtime.companions.jobs.endings import TERMINATED, DriverEnd
from mlx_runtime.companions.jobs.launching import pending
from mlx_runtime.companions.slurm.queue import run
from mlx_runtime.errors import ClusterError
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs import drivers
from mlx_runtime.runs.folder import SWEEP, find_run
from mlx_runtime.runs.records import LAUNCHER_FACTS
from mlx_runtime.settings import Settings


def requeue(path: str) -> bool:
    """Mark a preempted run as PENDING again, and requeue its job. Return False if the run is over, because a user
    stopped it.

    Raises:
        ClusterError: the run has not progressed, and would not in another job either, or Slurm refuses.
    """
    job = Settings.read().job
    assert job is not None, "the script of the job sets it"
    root = str(Path(path).parents[1])
    folder = find_run(root, Path(path).parent.name, Path(path).name)
    before = drivers.refuse_living(folder)
    saved = folder.name.startswith(SWEEP) or _has_saved(before)
    following = DriverEnd(TERMINATED, before["status"], before.get("stop_reason"), saved).next
    if following == "retry":
        raise ClusterError(
            f"{folder.title} was stopped by the time limit before its first checkpoint in this job, so the job is not "
            f"requeued. Give it more time: mlx train launch --slurm --resume={folder.title} --time=..."
        )
    if following == "done":
        return False
    facts = {name: before.get(name) for name in LAUNCHER_FACTS} | {"job": job}
    with pending(folder, before, (), **facts):
        print(f"requeued  {folder.title} resumes when the job {job['id']} starts again", flush=True)
        run("scontrol", "requeue", job["id"])  # ends this process, too
    return True


def _has_saved(record: Mapping[str, Any]) -> bool:
    """Return True if the last driver of a run has saved a checkpoint."""
    path = Path((record.get("latest") or {}).get("path") or "-")
    return path.exists() and path.stat().st_mtime > datetime.fromisoformat(record["start"]).timestamp()


if __name__ == "__main__":
    with clean_exit():
        sys.exit(0 if requeue(sys.argv[1]) else 1)
