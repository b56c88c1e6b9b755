"""Which checkpoints a run has: what their descriptions say, without reading their states or importing torch."""

import math
import re
from dataclasses import dataclass

from mlx_runtime.documents import COUNT, FILE_NAME, FLAG, NUMBER, TEXT, from_json, mapping_of
from mlx_runtime.errors import StorageError, first_line
from mlx_runtime.storage import Storage

STATE = "state.pt"
ABOUT = "checkpoint.json"

_SHAPE = {
    "epoch": COUNT,
    "finished": FLAG,
    "global_step": COUNT,
    "metrics": mapping_of(NUMBER.or_null()),
    "sha256": TEXT,
    "size_bytes": COUNT,
    "file": FILE_NAME,
}


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint without reading its state.

    Attributes:
        epoch: as code counts, from 0.
        finished: whether that epoch was over; else it was saved in the middle.
        global_step: training steps before it.
        metrics: numbers it is judged by.
        sha256: of its state, in hexadecimal.
        size_bytes: of its state.
        file: that holds its state, in its folder.
    """

    epoch: int
    finished: bool
    global_step: int
    metrics: dict[str, float]
    sha256: str = ""
    size_bytes: int = 0
    file: str = STATE

    @property
    def name(self) -> str:
        """Of its folder. Folders count epochs from 1, as a person does and as is printed."""
        epoch = f"epoch_{self.epoch + 1:04d}"
        return epoch if self.finished else f"{epoch}_step_{self.global_step:08d}"

    @property
    def order(self) -> tuple[int, bool, int]:
        """Rises with training."""
        return self.epoch, self.finished, self.global_step


def saved_in(root: str | Storage) -> list[Checkpoint]:
    """The checkpoints in a folder or URI that are whole, oldest first.

    Raises:
        StorageError: the storage does not answer.
    """
    found = found_in(root if isinstance(root, Storage) else Storage(root))
    return sorted((item for item in found.values() if item is not None), key=lambda item: item.order)


def found_in(storage: Storage) -> dict[str, Checkpoint | None]:
    """What there is by name, None for what has no readable description.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        names = [name for name in storage.names() if re.fullmatch(r"epoch_\d{4,}(_step_\d+)?", name)]
        found = {name: described(storage, name) for name in names}
        if not storage.local:  # where a save that was killed leaves a folder without one
            found = {name: item for name, item in found.items() if item or ABOUT in storage.names(name)}
    except OSError as error:
        raise StorageError(f"cannot read {storage.root}: {first_line(error)}") from error
    return found


def described(storage: Storage, name: str) -> Checkpoint | None:
    """What the description of a checkpoint says; None when there is none that can be read.

    Raises:
        OSError: the storage does not answer.
    """
    try:
        fields = from_json(storage.read(name, ABOUT), _SHAPE, needs=("metrics",))
        fields["metrics"] = {key: math.nan if item is None else item for key, item in fields["metrics"].items()}
        return Checkpoint(**fields)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
