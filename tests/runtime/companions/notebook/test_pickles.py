"""Functions on their way to workers: what is sent, what is refused, and what a resumed run refuses."""

import io
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.companions.notebook import inputs, pickles
from mlx_runtime.companions.notebook.pickles import Captured
from mlx_runtime.errors import ConfigError, UsageError

CELLS = """
from __future__ import annotations
import functools, os.path, re, threading, xml.dom.minidom
from dataclasses import dataclass
import torch
from torch.nn import functional as F

SIZE = 3  # of a batch
NAMES = {"b": [1.5, None], "a": ("${HOME}",), "nan": float("nan")}
rows = torch.arange(6.0).reshape(2, 3).T


class Empty(list):
    pass


@dataclass
class Options:
    steps: Undefined = SIZE


options = Options(2)


@functools.lru_cache
def square(x):
    return x * x


double = lambda x: square(x) / x * 2


def train(config):
    size = len(NAMES)  # shadows nothing
    log = "local, not the file"
    empty = Empty([xml.dom.minidom.parseString("<a/>").documentElement.tagName, log])
    return empty, options.steps, double(4), NAMES["a"], F.relu(-rows).sum().item(), rows.stride(), os.path.sep, size
"""


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`session(cells)` returns the names of a session, as `__main__`, that has executed cells, and keeps their text."""

    def execute(cells: str, *, kept: bool = True) -> dict[str, Any]:
        module = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        filename = f"<cell {hash(cells)}>"
        if kept:
            linecache.cache[filename] = (len(cells), None, cells.splitlines(keepends=True), filename)
        exec(compile(cells, filename, "exec"), vars(module))
        return vars(module)

    return execute


def sent(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function as a worker gets it, whose `__main__` is its own."""
    captured.write(file := io.BytesIO())
    file.seek(0)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    return pickles.read_function(file)


@pytest.mark.pure
class TestFunctions:
    def test_a_function_works_as_in_its_session(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        names = session(CELLS)
        captured = Captured(names["train"])
        here = names["train"]({})
        there = sent(captured, monkeypatch)({})
        assert there == here == (["a", "local, not the file"], 2, 8.0, ("${HOME}",), 0.0, (1, 3), "/", 3)
        assert type(there[0]) is vars(sys.modules["__main__"])["Empty"]  # so that it can be pickled by name

    def test_another_session_has_the_same_digests_whatever_else_it_has_defined(self, session: Any) -> None:
        digests = Captured(session(CELLS)["train"]).digests
        assert set(digests) >= {"train", "NAMES", "Empty", "options", "Options", "double", "square", "rows"}
        more = "\nunused = open(__file__) if 0 else re\n"
        assert Captured(session(CELLS.replace("# of a", "# of each") + more)["train"]).digests == digests
        edits = {
            "Options": ("SIZE = 3", "SIZE = 4"),
            "square": ("x * x", "x ** 2"),
        }
        for name, (old, new) in edits.items():
            edited = Captured(session(CELLS.replace(old, new))["train"]).digests
            assert {key.partition(".")[0] for key in edited if edited[key] != digests[key]} == {name}

    @pytest.mark.parametrize(
        ("cell", "message"),
        [
            (
                "import threading\nlock = threading.Lock()\ndef g(): lock.acquire()\ndef f(): g()",
                "f uses lock, a lock, which cannot be sent to workers: cannot pickle '_thread.lock' object; create it "
                "in the function",
            ),
            (
                "TOKEN = 'hf_abcdefghijklmnopqrst0123456'\ndef g(): return TOKEN\ndef f(): g()",
                "f uses TOKEN, which may hold a secret, and would be stored with the run; read it in the function, "
                "like os.environ['NAME']",
            ),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, session: Any, cell: str, message: str) -> None:
        with pytest.raises(UsageError) as caught:
            Captured(session(cell)["f"])
        assert str(caught.value) == message

    def test_other_variables_are_no_secrets(self, session: Any) -> None:
        cell = """
import torch
pad_token, max_tokens, key = "[PAD]", 512, "weight"
rows = torch.arange(6.0)
path = "/data/imagenet-1k/train"
token = "hf_abcdefghijklmnopqrst0123456"
def f(config): return pad_token, max_tokens, key, rows.sum().item(), path, config.token
"""
        assert "token" not in Captured(session(cell)["f"]).digests

    def test_a_pickle_of_another_version_of_python_is_refused(self, tmp_path: Path, session: Any) -> None:
        captured = Captured(session("def f(): pass")["f"])
        file = inputs.store_function(str(tmp_path), captured)
        inputs.check_function(str(tmp_path), "__main__.f", file)
        old = inputs.store(str(tmp_path), lambda stream: stream.write(b"3.9\ncos\nsystem\n(S'exit'\ntR."))
        for read in (inputs.check_function, inputs.load_function):
            with pytest.raises(ConfigError, match="was pickled by Python 3.9, and this is 3"):
                read(str(tmp_path), "__main__.f", old)
