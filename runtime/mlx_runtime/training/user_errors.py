"""Errors in user code on a worker."""

import contextlib
from pathlib import Path

from mlx_runtime.distributed.peers import lost_peer
from mlx_runtime.errors import MlxError, WorkerLoopError, WorkerLostError, short_message, user_errors


def loop_errors(rank: int, project: Path) -> contextlib.AbstractContextManager[None]:
    """Translate what user code raises inside the block.

    Args:
        rank: Rank of this worker.
        project: Folder of the experiment, whose frames the error shows.

    Raises:
        WorkerLoopError: User code failed.
        WorkerLostError: It failed because another worker is lost.
        MlxError: The runtime failed or refused something; unchanged.
    """

    def translate(error: BaseException, summary: str, trace: str) -> MlxError:
        if lost_peer(error):
            return WorkerLostError(f"rank {rank} lost its connection to another worker: {short_message(error)}")
        hint = " (worker_loop must return, not exit)" if isinstance(error, SystemExit) else ""
        return WorkerLoopError(rank, summary + hint, trace)

    return user_errors(project, translate)
