"""The driver of a RayJob, in the pod of the head: it trains the run of the job, or resumes it in a later attempt.

KubeRay starts a job again that has failed, on a new cluster, and submits it again to a cluster whose head was replaced.
The record of the run names its job, so each attempt finds the run of the earlier ones.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlx_runtime import companions
from mlx_runtime.cli.verbs import projects
from mlx_runtime.companions.jobs.endings import DriverEnd
from mlx_runtime.companions.jobs.launching import pending
from mlx_runtime.companions.kubernetes.manifest import PID_FILE
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import RunStopped, StorageError, UsageError
from mlx_runtime.exits import clean_exit
from mlx_runtime.runs import drivers
from mlx_runtime.runs.folder import SWEEP, RunFolder, claim_run, find_run, list_runs, run_folder
from mlx_runtime.runs.records import load_record
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import storage_at
from mlx_runtime.storage.leases import HEARTBEAT_S, STALE_S


def main(arguments: Sequence[str]) -> None:
    """Train. Arguments: the kind of folder (`run_` or `sweep_`), root, experiment, and the words of the command."""
    kind, root, experiment, *words = arguments
    job = Settings.read().job
    if job is None:
        raise UsageError("this process belongs to no job: MLX_JOB is not set")
    Path(tempfile.gettempdir(), PID_FILE).write_text(f"{os.getpid()}\n")
    (_sweep if kind == SWEEP else _train)(job, root, experiment, words)


def run_of(job: str, root: str, experiment: str) -> RunFolder | None:
    """Return the run of a job that an earlier attempt has claimed, or None.

    A run whose driver died just before it began cannot be continued; the next attempt claims another.
    """
    for folder in reversed(list_runs(root, experiment)):
        with contextlib.suppress(StorageError):  # claimed at this moment, or damaged
            if (load_record(folder).get("job") or {}).get("id") == job:
                return folder if folder.has_begun() or not folder.attempts() else None
    return None


def _train(job: Mapping[str, str], root: str, experiment: str, words: Sequence[str]) -> None:
    from mlx_runtime.driver.arguments import Request

    request, folder = Request.parse(words), run_of(job["id"], root, experiment)
    if folder is not None and _has_succeeded(folder):
        return
    if folder is None and request.resume:
        folder = find_run(root, experiment, request.resume)
    before = drivers.refuse_living(folder) if folder is not None and folder.has_begun() else {}
    folder = folder or claim_run(root, experiment)
    with ends_for_good(), pending(folder, before, request.overrides, job=dict(job)):
        projects.run(AN_EXPERIMENT, replace(request, claimed=folder.location, resume=None))


def _sweep(job: Mapping[str, str], root: str, experiment: str, words: Sequence[str]) -> None:
    """Run the sweep that is named like the job or after `--resume`, or resume it."""
    resumed = [word.partition("=")[2] for word in words if word.startswith("--resume=")]
    folder = run_folder(root, experiment, resumed[0] if resumed else f"{SWEEP}{job['id']}")
    words = [word for word in words if not word.startswith("--resume=")]
    if storage_at(folder.location).size_bytes(folder.record.name) is None:
        named = f"--name={job['id']}"
    elif _has_succeeded(folder) and not resumed:
        return
    else:
        named = f"--resume={folder.location}"
    command = companions.part("sweeps.commands").train_sweep
    with ends_for_good():
        command.main([named, *words], prog_name="mlx train sweep", standalone_mode=False)


def _has_succeeded(folder: RunFolder) -> bool:
    """Wait until an earlier attempt has ended, and return True if it has succeeded: KubeRay did not notice."""
    drivers.wait_for_end(folder, STALE_S + HEARTBEAT_S)
    succeeded = load_record(folder).get("status") == "SUCCEEDED"
    print(f"{folder.title} has succeeded" if succeeded else f"resuming  {folder.title}", flush=True)
    return succeeded


@contextlib.contextmanager
def ends_for_good() -> Iterator[None]:
    """Let the job end as STOPPED if nothing follows.

    After a preemption, like that of a drained node, this process exits as if it had failed, so that KubeRay starts the
    job again, `backoffLimit` times.
    """
    try:
        yield
    except RunStopped as error:
        if DriverEnd(error.exit_code, "STOPPED", error.reason).next == "done":
            raise
        print(f"{error}\nThe job fails, so that Kubernetes starts it again", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    with clean_exit():
        main(sys.argv[1:])
