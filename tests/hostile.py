"""Hostile content for documents: names that lead elsewhere, names that no file can have, and broken JSON."""

from pathlib import Path
from typing import Any

TEXTS = (
    *("", " ", ".", "..", "../..", "../../../../../../outside/x", "a/../../../../../../outside/x", "a/b", "/", "//x"),
    *("a\\b", "..\\..\\outside", "C:\\outside", "a\0b", "\0", "a\nb", "a\rb", "\x1b[2J", "a\x7f", "\u202e", "\u2028"),
    *("x" * 300, "é" * 150, "x" * 5_000, "\ud800", "a\udc80b", ".hidden", "-rf", "--help", " a", "a ", "a?b", "a#b"),
)
"""Text that is no name."""

VALUES: tuple[Any, ...] = (None, True, 0, -1, 2**70, 1e308, float("nan"), [], ["a"], [".."], {}, {"..": ".."})
"""Values that are not even text."""


BROKEN_JSON: tuple[bytes, ...] = (
    *(b"", b" ", b"null", b"true", b"5", b"1e999", b'"text"', b"[]", b"[{}]", b"{}", b"{", b'{"status"', b"}", b"NaN"),
    *(b"\x00", b"\xff\xfe\x00", b'{"status": "\xff"}', b'\xef\xbb\xbf{"status": "FAILED"}', b'{"status": NaN}'),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"9" * 5_000, b'{"status": 1e999}'),
    *(b'{"status": "RUNNING"}', b'{"status": "PENDING", "heartbeat": 5}', b'{"status": "\\u001b]0;x\\u0007"}'),
    *('{"status": "FAILED"}'.encode("utf-16"), b'{"status": "FAILED"} {}', b"{'status': 'FAILED'}", b'{"a": 01}'),
)
"""Content that is no document, or one of another shape."""


def names(outside: Path) -> list[Any]:
    """Return everything that is no name, with paths that lead to a folder."""
    return [*TEXTS, str(outside / "x"), f"{outside}/../{outside.name}/x", *VALUES]


def is_path(text: str) -> bool:
    """Return True for the texts above that lead to a file below a folder, though it is no name."""
    return text in (" ", "a/b", ".hidden", "-rf", "--help", " a", "a ", "a?b", "a#b")


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the type, modification time and content of everything in a folder, without following links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = facts.st_mode, facts.st_mtime_ns, content
    return found
