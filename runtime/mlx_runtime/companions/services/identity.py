"""The id of a run at a service, kept in its folder."""

from collections.abc import Callable
from pathlib import Path

from mlx_runtime.storage.local import open_regular


def read_or_create(file: Path, make: Callable[[], str]) -> str:
    """Return the content of a file, created with the result of `make` if it does not exist."""
    if not file.exists():
        file.write_text(make())
    with open_regular(str(file)) as stream:
        return stream.read().decode()
