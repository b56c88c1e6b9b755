"""Object stores supported by pyarrow, and the conditional writes of S3, which it lacks."""

import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl

import pyarrow.fs

from mlx_runtime.errors import StorageError, suggest
from mlx_runtime.extras import require
from mlx_runtime.storage.files import Storage, Stored, T

TIMEOUTS = {"connect_timeout": 3.0, "request_timeout": 3.0}
"""Seconds until pyarrow, with three attempts, gives up a connection to S3; by default, 90 s pass in all."""

GCS_LIMIT = "retry_limit_seconds=15"
"""Option of the URIs of Google Cloud Storage: pyarrow gives up after that time, by default after 15 minutes."""

RETRY_PAUSES_S = (10.0, 20.0)
"""Pauses before an action is repeated after an outage."""

S3_OPTIONS = {"allow_bucket_creation", "allow_bucket_deletion", "endpoint_override", "region", "scheme"}
"""Options of the URIs of S3 that users need."""

OUTAGE_S = 2.0
"""Minimum time for which calls fail at once after one that got no answer; otherwise as long as that one took."""

NO_ANSWER = "NETWORK_CONNECTION"
"""Part of pyarrow's messages about S3 servers that do not answer, after its retries."""

NO_TLS = "wrong version number"
"""Part of OpenSSL's message about a server that answers in plain HTTP."""


class Connection:
    """Calls an object store, so that the main thread can be interrupted and does not wait for each call of an outage.

    An interrupted call continues in its thread, and the next one waits for it, so that writes keep their order.
    """

    def __init__(self) -> None:
        self._lost_until, self._reason = 0.0, ""
        self._last: Future[Any] | None = None  # of the main thread

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the store; raise ConnectionError if the store does not answer."""
        if threading.current_thread() is not threading.main_thread():
            return self.attempt(function, *arguments)
        if self._last is not None:
            wait([self._last])
        self._last = future = Future[T]()

        def work() -> None:
            try:
                future.set_result(self.attempt(function, *arguments))
            except Exception as error:  # whatever it is, it is raised in the main thread
                future.set_exception(error)

        threading.Thread(target=work, name="object store", daemon=True).start()
        return future.result()

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do the same in this thread."""
        began = time.monotonic()
        if began < self._lost_until:
            raise ConnectionError(self._reason)
        try:
            return function(*arguments)
        except OSError as error:
            reason = str(error)
            if NO_TLS in reason:
                reason = "the server does not use TLS; if it serves plain HTTP, add the option scheme=http to the URI"
            elif NO_ANSWER in reason:
                reason = f"the server does not answer: {reason.rpartition('Details: ')[2]}"
            else:
                raise
            now = time.monotonic()
            self._lost_until, self._reason = now + max(OUTAGE_S, now - began), reason
            raise ConnectionError(self._reason) from error


class Upload(io.RawIOBase):
    """A new object, which exists once it is closed."""

    def __init__(self, stream: Any, connection: Connection) -> None:
        self._stream, self._connection = stream, connection
        self._position = 0

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._connection.attempt(self._stream.write, data)
        count = memoryview(data).nbytes
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._connection.call(self._stream.close)


_connections: dict[str, Connection] = {}
"""The connections of this process, by bucket and options."""


class ObjectStore(Storage):
    """Files below a URI like `s3://bucket/runs?region=eu-west-1`.

    The options after `?` are passed to pyarrow's file systems.
    """

    def __init__(self, root: str) -> None:
        uri = root
        if root.startswith(("gs://", "gcs://")) and GCS_LIMIT.partition("=")[0] not in _options(root):
            uri += ("&" if "?" in root else "?") + GCS_LIMIT
        try:
            self._fs, path = pyarrow.fs.FileSystem.from_uri(uri)
        except pyarrow.ArrowInvalid as error:
            for name in _options(root).keys() - S3_OPTIONS if root.startswith("s3:") else ():
                raise StorageError(
                    f"cannot reach {root}: S3 has no option {name}.{suggest(name, S3_OPTIONS)}"
                ) from error
            raise
        self.exclusive = self._fs.type_name == "s3"
        if self.exclusive:
            rebuild, (options,) = self._fs.__reduce__()
            self._fs = rebuild(options | TIMEOUTS)
        bucket = f"{path.partition('/')[0]}?{root.partition('?')[2]}"
        self._connection = _connections.setdefault(bucket, Connection())
        self._call = self._connection.call
        super().__init__(root, path)

    def __reduce__(self) -> tuple[type["ObjectStore"], tuple[str]]:  # the connection stays in its process
        return ObjectStore, (self.root,)

    def listed(self, *parts: str, recursive: bool = False) -> list[Stored]:
        selector = pyarrow.fs.FileSelector(self.of(*parts), allow_not_found=True, recursive=recursive)
        found = [self._entry(info) for info in self._call(self._fs.get_file_info, selector)]
        if not found:
            self._require_bucket()
        return found

    def find(self, *parts: str) -> Stored | None:
        info = self._call(self._fs.get_file_info, self.of(*parts))
        return self._entry(info) if info.type else None

    def open(self, *parts: str) -> Any:
        return self._call(self._fs.open_input_file, self.of(*parts))

    def create(self, *parts: str) -> BinaryIO:
        try:
            stream = self._call(self._fs.open_output_stream, self.of(*parts))
        except OSError:
            self._require_bucket()
            raise
        return cast(BinaryIO, Upload(stream, self._connection))

    def create_exclusively(self, data: bytes, *parts: str) -> bool:
        if not self.exclusive:
            raise StorageError(f"{self.root} does not support conditional writes")
        if not self._call(self.put_new, data, *parts):
            return False
        if self._call(self.put_new, data, *parts):  # a store that ignores the condition would accept every writer
            raise StorageError(f"{self.root} ignores the condition If-None-Match of S3's PutObject")
        return True

    def copy(self, old: str, new: str) -> None:
        self._call(self._fs.copy_file, self.of(old), self.of(new))

    def remove_file(self, *parts: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(self._fs.delete_file, self.of(*parts))

    def remove_folder(self, *parts: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(self._fs.delete_dir, self.of(*parts))

    def retry(self, action: Callable[[], T]) -> T:
        for pause_s in RETRY_PAUSES_S:
            try:
                return action()
            except (ConnectionError, StorageError) as error:
                if ConnectionError not in (type(error), type(error.__cause__)):
                    raise
            time.sleep(pause_s)
        return action()

    def read(self, *parts: str) -> bytes:
        return self._call(super().read, *parts)

    def document(self, *parts: str) -> bytes:
        return self._call(super().document, *parts)

    def write(self, data: bytes, *parts: str) -> None:
        self._call(super().write, data, *parts)

    def upload(self, file: Path, *parts: str) -> None:
        self._call(super().upload, file, *parts)

    def download(self, file: Path, *parts: str) -> None:
        self._call(super().download, file, *parts)

    def _require_bucket(self) -> None:
        bucket = self.path.partition("/")[0]
        if not self._call(self._fs.get_file_info, bucket).type:
            scheme = self.root.partition("://")[0]
            raise FileNotFoundError(
                f"the bucket {bucket} does not exist; create it, or name another, like {scheme}://BUCKET/runs"
            )

    def _entry(self, info: pyarrow.fs.FileInfo) -> Stored:
        path = info.path.removeprefix(self.path).lstrip("/")
        return Stored(path, info.size or 0, (info.mtime_ns or 0) / 1e9, info.is_file)

    @functools.cached_property
    def _client(self) -> Any:
        """Client for the conditional writes of S3."""
        import botocore.config
        import botocore.session

        options = _options(self.root)
        endpoint = options.get("endpoint_override")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        config = botocore.config.Config(s3={"addressing_style": "path"} if endpoint else {})
        session = botocore.session.get_session()
        return session.create_client("s3", region_name=self._fs.region, endpoint_url=endpoint, config=config)

    def put_new(self, data: bytes, *parts: str) -> bool:
        """Put an object on S3 with `If-None-Match: *`. Return False if it exists."""
        require("botocore", "storage on S3")
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        bucket, _, key = self.of(*parts).partition("/")
        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            code = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code in (409, 412):  # another writer is creating it, or has created it
                return False
            if code == 501:
                raise StorageError(f"{self.root} does not implement If-None-Match of S3's PutObject") from error
            raise OSError(str(error)) from error
        except NoCredentialsError as error:
            raise OSError(f"{error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE") from error
        except BotoCoreError as error:
            raise OSError(str(error)) from error
        return True


def _options(uri: str) -> dict[str, str]:
    """Return the options of a URI."""
    return dict(parse_qsl(uri.partition("?")[2]))
