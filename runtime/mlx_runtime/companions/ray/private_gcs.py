"""The private API of Ray 2.60 that needs neither torch nor Ray Train: packages that clients upload to a cluster."""

from collections.abc import Iterator

from ray._raylet import GcsClient  # type: ignore[attr-defined]

PROTOCOL = b"gcs://"


class Packages:
    """The packages whose names begin with a prefix, as `PUT /api/packages/gcs/NAME` stores them.

    Methods raise `ray.exceptions.RaySystemError` and the like when the head is gone.
    """

    def __init__(self, address: str, prefix: str) -> None:
        self._client, self._prefix = GcsClient(address=address), PROTOCOL + prefix.encode()

    def take(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each package, and remove it."""
        for key in self._client.internal_kv_keys(self._prefix, None):
            content = self._client.internal_kv_get(key, None)
            self._client.internal_kv_del(key, False, None)
            if content is not None:
                yield key.removeprefix(PROTOCOL).decode(), content
