"""A storage in a SQLite database: `cfg.storage_path=sqlite:///home/me/runs.db`."""

import io
import sqlite3
import time

from mlx_runtime.storages import Storage, Stored

TABLE = "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, content BLOB, modified REAL)"


class Database(Storage):
    """Files in a table. A root may lead to a folder in the database, like `sqlite:///home/me/runs.db/digits`."""

    def __init__(self, root):
        super().__init__(root, root.removeprefix("sqlite://"))
        self._file = self.path.partition(".db")[0] + ".db"

    def _execute(self, statement, *values):
        with sqlite3.connect(self._file, timeout=60) as connection:
            connection.execute(TABLE)
            return connection.execute(statement, values).fetchall()

    def listed(self, *parts, recursive=False):
        folder, found = self.of(*parts) + "/", {}
        query = "SELECT path, length(content), modified FROM files WHERE substr(path, 1, ?) = ?"
        for path, size, modified in self._execute(query, len(folder), folder):
            name, *inside = path.removeprefix(folder).split("/")
            if inside and not recursive:  # a folder exists if there is a file in it
                path, size, modified = folder + name, 0, 0.0
            path = path.removeprefix(self.path).lstrip("/")
            found[path] = Stored(path, size, modified, is_file=recursive or not inside)
        return list(found.values())

    def find(self, *parts):
        query = "SELECT length(content), modified FROM files WHERE path = ?"
        for size, modified in self._execute(query, self.of(*parts)):
            return Stored("/".join(parts), size, modified)
        return Stored("/".join(parts), is_file=False) if self.listed(*parts) else None

    def open(self, *parts):
        for (content,) in self._execute("SELECT content FROM files WHERE path = ?", self.of(*parts)):
            return io.BytesIO(content)
        raise FileNotFoundError(self.of(*parts))

    def create(self, *parts):
        return NewFile(lambda data: self._put("INSERT OR REPLACE", data, *parts))

    def create_exclusively(self, data, *parts):
        try:
            self._put("INSERT", data, *parts)
        except sqlite3.IntegrityError:
            return False
        return True

    def _put(self, how, data, *parts):
        self._execute(f"{how} INTO files VALUES (?, ?, ?)", self.of(*parts), data, time.time())

    def remove_file(self, *parts):
        self._execute("DELETE FROM files WHERE path = ?", self.of(*parts))

    def remove_folder(self, *parts):
        folder = self.of(*parts) + "/"
        self._execute("DELETE FROM files WHERE substr(path, 1, ?) = ?", len(folder), folder)


class NewFile(io.BytesIO):
    """A file that appears in the database when it is closed, unless an exception has interrupted its writer."""

    def __init__(self, put):
        super().__init__()
        self._put = put

    def __exit__(self, kind, error, trace):
        if error is None:
            self.close()

    def close(self):
        if not self.closed:
            self._put(self.getvalue())
        super().close()
