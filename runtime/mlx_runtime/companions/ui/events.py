"""Images and texts that runs wrote to TensorBoard, read from their event files."""

import tempfile
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.tables import FileCache
from mlx_runtime.errors import StorageError
from mlx_runtime.extras import require
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.documents import stays_below
from mlx_runtime.storage.files import storage_at, storage_errors

LATEST = 4
"""Number of images and texts of each name that are read, the latest ones."""

MOST_BYTES = 16 << 20
"""Maximum size of the event files of a run, which are read while others wait; TensorBoard itself reads larger ones."""

EVENTS = FileCache(20)

Written = tuple[str, int, bytes | str]
"""Name, step, and an image or a text."""


def read_written(folder: RunFolder) -> list[Written]:
    """Return the latest images and texts of a run. Raises StorageError if its event files cannot be read."""
    with storage_errors(f"cannot read {folder.location}"):
        found = [item for item in storage_at(folder.location).listed() if ".tfevents." in item.name and item.is_file]
    if not found:
        return []
    if sum(item.size_bytes for item in found) > MOST_BYTES:
        raise StorageError(f"the event files of {folder.title} are large; open: mlx xp board {folder.location}")
    newest = max(found, key=lambda item: (item.modified_s, item.name)).name
    written: list[Written] = EVENTS.get(folder, newest, lambda: _read(folder, [item.name for item in found]))
    return written


def _read(folder: RunFolder, names: list[str]) -> list[Written]:
    require("tensorboard", "reading images and texts")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (
        tempfile.TemporaryDirectory(prefix="mlx-events-") as temporary,
        storage_errors(f"cannot read {folder.location}"),
    ):
        for name in filter(stays_below, names):
            storage_at(folder.location).download(Path(temporary, name), name)
        events: Any = EventAccumulator(temporary, {"images": 0, "tensors": 0, "scalars": 1, "histograms": 1})
        try:
            events.Reload()
        except Exception as error:  # of protocol buffers, for example
            raise StorageError(f"the event files of {folder.title} are damaged: {type(error).__name__}") from error
        tags = events.Tags()
        images = [
            (tag, item.step, item.encoded_image_string)
            for tag in tags["images"]
            for item in events.Images(tag)[-LATEST:]
        ]
        texts = [
            (tag, item.step, b"\n".join(item.tensor_proto.string_val).decode(errors="replace"))
            for tag in tags["tensors"]
            if events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
            for item in events.Tensors(tag)[-LATEST:]
        ]
    return images + texts
