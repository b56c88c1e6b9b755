"""Descriptions of checkpoints, listed and ranked without reading states or importing torch."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_runtime.errors import printable
from mlx_runtime.storage.documents import COUNT, FLAG, NAME, NUMBER, TEXT, from_json, mapping_of
from mlx_runtime.storage.files import Storage, join_path, storage_at, storage_errors
from mlx_runtime.storage.local import IrregularError

STATE = "state.pt"
ABOUT = "checkpoint.json"
INDEX = "index.json"

_SHAPE = {
    "epoch": COUNT,
    "finished": FLAG,
    "global_step": COUNT,
    "metrics": mapping_of(NUMBER.or_null()),
    "sha256": TEXT,
    "size_bytes": COUNT,
    "file": NAME,
    "index": NAME.or_null(),
    "index_sha256": TEXT,
    "shards_bytes": COUNT,
}


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint, as `checkpoint.json` stores it."""

    epoch: int  # counted from 0
    finished: bool  # False if it was saved in the middle of the epoch
    global_step: int  # training steps before it
    metrics: dict[str, float]  # last values since the checkpoint of an earlier step, by which it is ranked
    sha256: str = ""  # of its state, in hexadecimal
    size_bytes: int = 0  # of its state
    file: str = STATE  # name of the file with its state
    index: str | None = None  # name of the file that describes the shards, if its state has any
    index_sha256: str = ""  # in hexadecimal
    shards_bytes: int = 0  # of all shards

    @property
    def name(self) -> str:
        """Name of its folder, in which epochs are counted from 1."""
        epoch = f"epoch_{self.epoch + 1:04d}"
        return epoch if self.finished else f"{epoch}_step_{self.global_step:08d}"

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sort key that rises with training."""
        return self.epoch, self.finished, self.global_step


def score(value: float | None, mode: str) -> float:
    """Return a score for a value, higher is better. All that is called best has the highest score.

    None, NaN and infinities are never the best: their score is minus infinity, below that of any other value.
    """
    if value is None or not math.isfinite(value):
        return -math.inf
    return value if mode == "max" else -value


def best_first(checkpoints: Iterable[CheckpointInfo], metric: str | None, mode: str) -> list[CheckpointInfo]:
    """Return the checkpoints with a finite value of a metric, best first; of equal values, the later is better.

    Checkpoints in the middle of an epoch are ranked like all others.
    """
    scored = [(score(item.metrics.get(metric or ""), mode), item.order, item) for item in checkpoints]
    known = [found for found in scored if found[0] > -math.inf]
    return [item for _, _, item in sorted(known, key=lambda found: found[:2], reverse=True)]


def position(entry: Mapping[str, Any]) -> str:
    """Return the position of a checkpoint in training: `epoch 2`, or `epoch 2, step 1,500` within the epoch."""
    step = f", step {entry['step']:,}" if entry.get("step") is not None else ""
    return f"epoch {entry['epoch'] + 1}{step}"


def list_checkpoints(root: str | Storage, *, report: bool = False) -> list[CheckpointInfo]:
    """Return the complete checkpoints in a folder or URI, oldest first.

    With `report`, checkpoints without a readable description are listed on stderr.
    """
    storage = root if isinstance(root, Storage) else storage_at(root)
    checkpoints = checkpoints_by_name(storage)
    for name in (name for name, item in checkpoints.items() if item is None and report):
        print(printable(f"warning: left out {name}: {no_description(storage, name)}", one_line=True), file=sys.stderr)
    return sorted((item for item in checkpoints.values() if item is not None), key=lambda item: item.order)


def no_description(storage: Storage, name: str) -> str:
    """Return the problem of a checkpoint without a readable description."""
    return f"{join_path(storage.root, name, ABOUT)} is damaged: it does not describe a checkpoint"


def checkpoints_by_name(storage: Storage) -> dict[str, CheckpointInfo | None]:
    """Return all checkpoints by name, with None for those without a readable description."""
    with storage_errors(f"cannot read {storage.root}"):
        names = [name for name in storage.names() if re.fullmatch(r"epoch_\d{4,}(_step_\d+)?", name)]
        checkpoints = {name: read_description(storage, name) for name in names}
        if not storage.local:  # there, a killed save leaves a folder without a description
            checkpoints = {name: item for name, item in checkpoints.items() if item or ABOUT in storage.names(name)}
    return checkpoints


def read_description(storage: Storage, name: str) -> CheckpointInfo | None:
    """Return the description of a checkpoint, or None if there is no readable one; OSErrors are raised."""
    try:
        fields = from_json(storage.document(name, ABOUT), _SHAPE, needs=("metrics",))
        fields["metrics"] = {key: math.nan if item is None else item for key, item in fields["metrics"].items()}
        return CheckpointInfo(**fields)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, IrregularError, ValueError, TypeError):
        return None
