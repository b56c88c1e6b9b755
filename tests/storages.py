"""A storage with some data.

<storage>/
    data/digits/          a.bin 3,000 bytes, b.bin 1,000, deep/er/c.bin 500, deep/er/d.bin 500
"""

from pathlib import Path

from mlx_runtime.storage.files import storage_at

SIZES = {"data/digits/a.bin": 3000, "data/digits/b.bin": 1000, "data/digits/deep/er/c.bin": 500}
SIZES |= {"data/digits/deep/er/d.bin": 500}


def put(root: str, files: dict[str, bytes]) -> None:
    storage = storage_at(root)
    for name, content in files.items():
        if storage.local:
            Path(storage.of(name)).parent.mkdir(parents=True, exist_ok=True)
        storage.write(content, *name.split("/"))


def filled(root: str) -> str:
    """Fill a storage with the data, and return it."""
    put(root, {name: b"x" * size for name, size in SIZES.items()})
    return root


def files(root: str) -> list[str]:
    storage = storage_at(root)
    return sorted(item.path for item in storage.below())
