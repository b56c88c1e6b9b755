"""Errors of datasets read by other processes."""

from mlx_runtime.distributed.collectives import lost_peer
from mlx_runtime.errors import DatasetError, MlxError, WorkerLostError, short_message


def dataset_error(error: BaseException, what: str) -> MlxError:
    """Return the MlxError for an exception of another process: raised by user code, or a lost process."""
    if lost_peer(error):
        return WorkerLostError(f"{what}: {short_message(error)}")
    cause = error
    while not isinstance(cause, MlxError):
        inner = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(inner, BaseException):
            break
        cause = inner
    if isinstance(cause, MlxError):
        return cause
    notes = "".join(f" ({text})" for text in getattr(cause, "__notes__", []))
    return DatasetError(f"{what}: {type(cause).__name__}: {short_message(cause)}{notes}")
