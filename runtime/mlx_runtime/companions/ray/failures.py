"""Errors of Ray about workers, translated into those of the runtime."""

import re

import ray.exceptions

from mlx_runtime.errors import MlxError, full_message, short_message
from mlx_runtime.workers.recovery import WorkerDied

LARGEST = 3  # processes named after a lack of memory


def failure_of(rank: int, error: ray.exceptions.RayError) -> MlxError | WorkerDied:
    """Return the error for a worker whose call has failed: a `WorkerDied` if it may be replaced."""
    if isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.RuntimeEnvSetupError):  # it would fail again
        cause = getattr(error, "cause", None) or error
        lines = [line for line in full_message(cause).splitlines() if line.strip()]
        why = short_message(cause) if len(lines) < 2 else f"{short_message(cause)} {lines[-1].strip()}"
        return MlxError(f"rank {rank} failed on Ray: {type(cause).__name__}: {why}")
    return WorkerDied(_problem(error))


def _problem(error: BaseException) -> str:
    """Return the first line of an error: if Ray freed memory, with the node, its limit, and its largest processes."""
    text = short_message(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):  # only its text names them
        largest = re.findall(r"^\d+\t([\d.]+)\t(.{1,60})", full_message(error), re.MULTILINE)[:LARGEST]
        text += (
            f"; largest processes: {', '.join(f'{size} GB {command}' for size, command in largest)}" if largest else ""
        )
    return text
