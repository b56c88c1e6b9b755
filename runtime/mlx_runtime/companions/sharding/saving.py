"""Storing of checkpoints with shards: each worker writes its parts, and rank 0 everything else."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from mlx_runtime.companions.sharding.shards import Parts
from mlx_runtime.companions.sharding.writer import ShardedTensorWriter, StagedPlanner, failure
from mlx_runtime.runs.checkpoints.groups import State
from mlx_runtime.runs.checkpoints.index import ABOUT, INDEX, CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.storage.publishing import HashingWriter, Publication


def save_checkpoint(
    store: CheckpointStore,
    state: State | None,
    checkpoint: CheckpointInfo,
    parts: Parts,
    staged: Mapping[str, torch.Tensor],
    group: Any,
    allowed: Callable[[], None] = lambda: None,
) -> CheckpointInfo:
    """Store a checkpoint with shards atomically. Every worker must call this, in the order of their collectives.

    Args:
        store: The checkpoints of the run.
        state: On rank 0, the part that is not sharded.
        checkpoint: Description of the checkpoint.
        parts: The sharded tensors.
        staged: Copies of this worker's parts of them.
        group: Process group, not used by anything else meanwhile.
        allowed: On rank 0, the same as for `CheckpointStore.save`.
    """
    writer, about = ShardedTensorWriter(store.storage), checkpoint
    publication = Publication(store.storage, checkpoint.name, ABOUT)

    def write_rest() -> None:
        nonlocal about
        about = store.write_state(publication, state, checkpoint)

    def publish(index: bytes, size_bytes: int) -> None:
        nonlocal about
        file_name = publication.unique(INDEX)
        with HashingWriter(publication.create(file_name)) as file:
            file.write(index)
        about = replace(about, index=file_name, index_sha256=file.sha256, shards_bytes=size_bytes)
        store.publish(publication, about, allowed)

    with contextlib.ExitStack() as stack:
        if state is not None:
            begin = partial(stack.enter_context, publication)
            writer = ShardedTensorWriter(store.storage, publication, begin, write_rest, publish)
        try:
            planner = StagedPlanner(staged)
            save(dict(parts.tensors), storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            failure(error, store.problem)
    return about
