"""Files on a folder or an object store alike: the few operations that runs and prepared sets need.

A root is a folder or a URI like `s3://bucket/runs?region=eu-west-1`; after `?` stand options of its file system.
"""

import contextlib
import json
import math
import os
import shutil
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mlx_runtime.errors import StorageError, first_line

if TYPE_CHECKING:
    import pyarrow.fs


def is_uri(root: str) -> bool:
    return "://" in root


def joined(root: str, *parts: str) -> str:
    """A place below a root: parts go before the options of a URI."""
    if not is_uri(root):
        return os.path.join(root, *parts)  # noqa: PTH118 - for the same reason
    base, options = split_options(root)
    return "/".join([base.rstrip("/"), *parts]) + options


def split_options(root: str) -> tuple[str, str]:
    """A URI without its options, and these with their `?`. A folder has none, whatever is in its name."""
    if not is_uri(root):
        return root, ""
    base, mark, options = root.partition("?")
    return base, mark + options


class Storage:
    """A folder or a URI.

    Attributes:
        root: as given.
        path: of the root there.
        local: whether it is a folder of this machine, perhaps a shared one.

    Raises:
        StorageError: there is no file system for such a URI.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.local = not is_uri(root) or root.startswith("file:")
        path = root
        try:
            if is_uri(root):
                import pyarrow.fs  # here, so that commands that need no object store stay instant

                try:
                    self.fs, path = pyarrow.fs.FileSystem.from_uri(root)
                except pyarrow.ArrowException as error:
                    raise ValueError(first_line(error)) from error
            else:
                path = os.path.realpath(os.path.expanduser(root))  # noqa: PTH111 - listings do this for each run
        except (RuntimeError, ValueError, OSError) as error:
            raise StorageError(f"cannot reach {root}: {first_line(error)}") from error
        self.path = path.rstrip("/")
        if not self.path:
            raise StorageError(f"cannot reach {root}: it names no folder")

    @cached_property
    def fs(self) -> "pyarrow.fs.FileSystem":
        """Its file system."""
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem()

    def of(self, *parts: str) -> str:
        """A place below the root, as its file system names it."""
        return "/".join([self.path, *parts])

    def listed(self, *parts: str) -> "list[pyarrow.fs.FileInfo]":
        """What is in a folder; nothing when there is none."""
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.of(*parts), allow_not_found=True)
        infos: list[pyarrow.fs.FileInfo] = self.fs.get_file_info(selector)
        return infos

    def below(self, *parts: str) -> "list[pyarrow.fs.FileInfo]":
        """All files in a folder and the folders in it."""
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.of(*parts), allow_not_found=True, recursive=True)
        return [info for info in self.fs.get_file_info(selector) if info.is_file]

    def names(self, *parts: str) -> list[str]:
        """The names in a folder, in order."""
        if self.local:  # many times faster, and listings of all runs ask often
            try:
                return sorted(os.listdir(self.of(*parts)))
            except FileNotFoundError:
                return []
        return sorted(info.base_name for info in self.listed(*parts))

    def size_bytes(self, *parts: str) -> int | None:
        """Of a file, or None when there is none."""
        info = self.fs.get_file_info(self.of(*parts))
        return info.size if info.is_file else None

    def read(self, *parts: str) -> bytes:
        """A whole file.

        Raises:
            OSError: there is none, or the storage does not answer.
        """
        if self.local:
            with open(self.of(*parts), "rb") as file:  # noqa: PTH123 - for the same reason
                return file.read()
        with self.fs.open_input_stream(self.of(*parts)) as stream:
            content: bytes = stream.read()
        return content

    def write(self, data: bytes, *parts: str) -> None:
        """Replace a file so that readers see the old or the new one, never a part.

        Raises:
            OSError: the storage does not take it.
        """
        if self.local:
            write_atomic(Path(self.of(*parts)), data)
        else:
            with self.fs.open_output_stream(self.of(*parts)) as stream:
                stream.write(data)

    def upload(self, file: Path, *parts: str) -> None:
        """Copy a file of this machine here."""
        with file.open("rb") as source, self.fs.open_output_stream(self.of(*parts)) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def download(self, file: Path, *parts: str) -> None:
        """Copy a file from here to this machine."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self.fs.open_input_stream(self.of(*parts)) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def create(self, *parts: str) -> BinaryIO:
        """A file to write to; on an object store it is there once it is closed."""
        if self.local:
            return Path(self.of(*parts)).open("wb")
        stream: BinaryIO = self.fs.open_output_stream(self.of(*parts))
        return stream

    def open(self, *parts: str) -> Any:
        """A file to read from, seekable."""
        return self.fs.open_input_file(self.of(*parts))

    def claim(self, *parts: str) -> bool:
        """Make a folder that nobody else has made: of several callers at the same instant one at most gets True.

        Raises:
            OSError: the storage does not take it.
        """
        if self.local:
            try:
                Path(self.of(*parts)).mkdir()
            except FileExistsError:
                return False
            return True
        mine = f".claim-{uuid.uuid4().hex}"
        self.write(b"", *parts, mine)
        # Listing shows what was written before, so of two writers one at least sees the other and gives way.
        if self.names(*parts) == [mine]:
            return True
        self.remove_file(*parts, mine)
        return False

    @property
    def exclusive(self) -> bool:
        """Whether `create_exclusively` works here: on a file system, and on object stores that speak S3's API."""
        return self.local or self.fs.type_name == "s3"

    def create_exclusively(self, data: bytes, *parts: str) -> bool:
        """Create a file unless it exists: of several callers at the same instant exactly one gets True.

        Raises:
            OSError: the storage does not take it.
            StorageError: it has no such operation, so nobody can be sure to be the only one.
        """
        if self.local:
            try:
                with Path(self.of(*parts)).open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:
                return False
            return True
        if not self.exclusive:
            raise StorageError(f"{self.root} cannot create a file only if there is none")
        if not self._put_new(data, *parts):
            return False
        if self._put_new(data, *parts):  # a store that ignores the condition would have let in anyone
            raise StorageError(f"{self.root} ignores the condition If-None-Match of S3's PutObject")
        return True

    def _put_new(self, data: bytes, *parts: str) -> bool:
        """S3's PutObject with `If-None-Match: *`, which pyarrow does not have. Returns False if the object exists."""
        import botocore.config
        import botocore.exceptions
        import botocore.session

        options = dict(urllib.parse.parse_qsl(self.root.partition("?")[2]))
        endpoint = options.get("endpoint_override")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        bucket, _, key = self.of(*parts).partition("/")
        style = {"addressing_style": "path"} if endpoint else {}
        try:
            client = botocore.session.get_session().create_client(
                "s3",
                region_name=self.fs.region,
                endpoint_url=endpoint,
                config=botocore.config.Config(s3=style),
            )
            client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except botocore.exceptions.ClientError as error:
            code = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code in (409, 412):  # somebody else is creating it, or has
                return False
            if code == 501:
                raise StorageError(f"{self.root} does not implement If-None-Match of S3's PutObject") from error
            raise OSError(str(error)) from error
        except botocore.exceptions.BotoCoreError as error:
            raise OSError(str(error)) from error
        return True

    def move(self, old: str, new: str) -> None:
        """Give a folder another name; on an object store file by file.

        Raises:
            OSError: the storage does not take it.
        """
        if self.local:
            Path(self.of(old)).rename(self.of(new))
        else:
            for name in self.names(old):
                self.fs.move(self.of(old, name), self.of(new, name))

    def remove_file(self, *parts: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self.of(*parts))

    def remove_folder(self, *parts: str) -> None:
        """Remove a folder with everything in it, following no links.

        Raises:
            OSError: something is left.
        """
        with contextlib.suppress(FileNotFoundError):
            if not self.local:
                self.fs.delete_dir(self.of(*parts))
                return
            with opened(self.path, *parts[:-1]) if parts else opened(str(Path(self.path).parent)) as above:
                error = remove_tree(parts[-1] if parts else Path(self.path).name, above)
            if error is not None:
                raise error


@contextlib.contextmanager
def opened(root: str, *parts: str) -> Iterator[int]:
    """Open a folder of this machine while the block runs. Yields its descriptor.

    Args:
        root: an existing folder; it may be a link.
        parts: of the path below it. None of them may be a link: somebody may have just put it there.

    Raises:
        OSError: one of them is missing, a link, or no folder.
    """
    with contextlib.ExitStack() as stack:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        for part in parts:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            stack.callback(os.close, folder)
        yield folder


def remove_tree(name: str, above: int) -> OSError | None:
    """Remove a folder and all that can be removed below it, following no links.

    Every step goes through the descriptor of a folder, so that a folder which is swapped for a link meanwhile does not
    lead anywhere else. (`shutil.rmtree` does the same, but takes a descriptor only since Python 3.11.)

    Args:
        name: of the folder.
        above: descriptor of the folder that it is in.

    Returns:
        The first error if something is left, else None.
    """
    errors: list[OSError] = []

    def removed(name: str, folder: int, shown: str) -> None:
        try:
            try:
                os.rmdir(name, dir_fd=folder)
            except NotADirectoryError:
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            error.filename = shown
            errors.append(error)

    try:
        for path, folders, files, folder in os.fwalk(name, topdown=False, onerror=errors.append, dir_fd=above):
            for entry in [*files, *folders]:
                removed(entry, folder, f"{path}/{entry}")
    except OSError as error:  # the folder itself cannot be listed
        errors.append(error)
    removed(name, above, name)
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return errors[0] if errors else None


def size_text(size_bytes: float) -> str:
    """A size for people: `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            break
        size_bytes /= 1000
    return f"{size_bytes:,.0f} bytes" if unit == "bytes" else f"{size_bytes:,.1f} {unit}"


def to_json(value: Any) -> str:
    """JSON text with a newline at its end. JSON has no NaN and no infinity; they become null."""
    return json.dumps(_finite(value), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomic(path: Path, content: str | bytes, allowed: Callable[[], None] = lambda: None) -> None:
    """Replace a file's content so that a reader sees the old or the new one, never a part.

    Args:
        path: of the file.
        content: new content.
        allowed: called between writing the new file and renaming it; raises to leave the old one. Whoever then
            removes the new file with `discard_unfinished` keeps it from being renamed at all.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        allowed()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def discard_unfinished(path: Path) -> None:
    """Remove what `write_atomic` calls for this file have written and not renamed yet."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        temporary.unlink(missing_ok=True)
