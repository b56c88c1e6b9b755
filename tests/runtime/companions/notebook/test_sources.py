"""Functions of cells without `%%mlx`: what is sent to workers, what is refused, and a real kernel."""

import base64
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.companions.hub.detection import find
from mlx_runtime.companions.notebook.background import load_bound_config
from mlx_runtime.companions.notebook.calls import override
from mlx_runtime.companions.notebook.functions import FunctionExperiment
from mlx_runtime.companions.notebook.scripts import load
from mlx_runtime.companions.notebook.sources import FunctionModule, changed_names, execute
from mlx_runtime.driver.arguments import Request
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


def session(cells: str, *, kept: bool = True) -> dict[str, Any]:
    """Return the names of an interactive session that has executed cells, and keeps their text."""
    names: dict[str, Any] = {"__name__": "__main__"}
    filename = f"<cell {hash(cells)}>"
    if kept:
        linecache.cache[filename] = (len(cells), None, cells.splitlines(keepends=True), filename)
        names["In"] = ["", cells]
    exec(compile(cells, filename, "exec"), names)
    return names


@pytest.mark.pure
class TestSource:
    def test_a_function_works_as_in_its_session(self) -> None:
        names = session(CELLS)
        source = FunctionModule(names, "train").text()
        here, there = names["train"]({}), load("mlx_cells.train", source)({})
        assert there == here == (["a", "local, not the file"], 2, 8.0, ("${HOME}",), 0.0, (1, 3), "/", 3)
        assert "${" not in source  # conf.yaml would look it up
        assert "re." not in source

    def test_another_session_has_the_same_source_whatever_else_it_has_defined(self) -> None:
        more = "\nunused = open(__file__) if 0 else re\n"
        other = FunctionModule(session(CELLS.replace("# of a", "# of each") + more), "train").text()
        source = FunctionModule(session(CELLS), "train").text()
        assert other == source
        edits = {"SIZE": ("SIZE = 3", "SIZE = 4"), "rows": ("(6.0)", "(6)"), "double": ("* 2", "")}
        for name, (old, new) in edits.items():
            edited = FunctionModule(session(CELLS.replace(old, new)), "train").text()
            assert changed_names(source, edited) == [name]

    @pytest.mark.parametrize(
        ("cell", "message"),
        [
            (
                "import sys\nlog = sys.__stdout__\ndef f(): log.read()",
                "f uses log, a TextIOWrapper, which cannot be sent to workers: cannot pickle '_io.TextIOWrapper' "
                "object; create it in the function",
            ),
            (
                "import threading\nlock = threading.Lock()\ndef g(): lock.acquire()\ndef f(): g()",
                "f uses lock, a lock, which cannot be sent to workers: cannot pickle '_thread.lock' object; create it "
                "in the function",
            ),
            (
                "import torch\nx = torch.empty(2, device='meta')\ndef f(): return [x]",  # like one on a GPU
                "f uses x, a Tensor, which cannot be sent to workers: a tensor is on meta; create it in the function",
            ),
            (
                "import torch\nrows = torch.zeros(100_000)\ndef f(): return rows",
                "f uses rows, a Tensor, which cannot be sent to workers: it has 400,246 bytes, and 262,144 is the "
                "maximum; create it in the function",
            ),
            (
                "def make(lock):\n    def inner():\n        return lock\n    return inner\ng = make(1)\ndef f(): g()",
                "f uses g, which cannot be sent to workers: it was defined in make; define it at the top level "
                "of a cell",
            ),
            (
                "class A: pass\na = A()\nclass A: pass\ndef f(): return a",
                "f uses A, a type, which cannot be sent to workers: another definition has replaced it; create it in "
                "the function",
            ),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, cell: str, message: str) -> None:
        with pytest.raises(UsageError) as caught:
            FunctionModule(session(cell), "f")
        assert str(caught.value) == message

    def test_a_session_that_keeps_no_source_is_refused(self) -> None:
        with pytest.raises(UsageError, match="^f cannot be sent to workers: its source is not kept here; use IPython"):
            FunctionModule(session("def f(): pass", kept=False), "f")

    def test_tracebacks_have_the_lines_of_the_source(self) -> None:
        execute("def f():\n    return 1 / 0\n")
        assert linecache.getline("<mlx_cells>", 2) == "    return 1 / 0\n"

    @pytest.mark.parametrize(
        ("cell", "text"),
        [
            ("TOKEN = 'hf_abcdefghijklmnopqrst0123456'", "TOKEN = _secret('TOKEN')"),
            ("db_password = 'two\\nlines'", "db_password = eval(_secret('db_password'))"),
            ("x = ['https://user:pass-9f8e@example.com']", "x = eval(_secret('x'))"),
            ("x = {'Authorization': 'Bearer abcdefgh12345678XYZ'}", "x = eval(_secret('x'))"),
            (
                "from types import SimpleNamespace\nx = SimpleNamespace(api_key='plain-9f8e7d')",
                "x = eval(_secret('x'))",
            ),
        ],
    )
    def test_variables_with_secrets_are_not_in_the_source(self, cell: str, text: str) -> None:
        name = text.partition(" ")[0]
        names = session(f"{cell}\nsize = 3\ndef f(): return {name}, size")
        module = FunctionModule(names, "f")
        source = module.text()
        assert text in source
        assert "size = 3" in source
        assert list(module.secrets) == [name]
        assert list(find(source, code=True)) == []
        assert load("mlx_cells.f", source, module.secrets)() == names["f"]()

    def test_other_variables_are_in_the_source(self) -> None:
        cell = """
import torch
pad_token, max_tokens, key = "[PAD]", 512, "weight"
rows = torch.arange(6.0)
path = "/data/imagenet-1k/train"
def f(): return pad_token, max_tokens, key, rows.sum().item(), path
"""
        module = FunctionModule(session(cell), "f")
        module.text()
        assert module.secrets == {}

    def test_a_secret_that_is_missing_on_resume_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = FunctionModule(session("TOKEN = 'hf_abcdefghijklmnopqrst0123456'\ndef f(): return TOKEN"), "f")
        monkeypatch.setenv("MLX_VALUE_TOKEN", "")  # restored after the test
        ((name, reference),) = module.references().items()
        request = Request((override(f"cfg.variables.{name}", reference),))
        assert load_bound_config(FunctionExperiment, request, "f").cfg.variables == module.secrets
        monkeypatch.delenv("MLX_VALUE_TOKEN")
        with pytest.raises(ConfigError) as caught:
            load_bound_config(FunctionExperiment, request, "f")
        assert "Environment variable 'MLX_VALUE_TOKEN' not found" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_secret_that_does_not_fit_into_the_environment_is_refused(self) -> None:
        cell = "password = 'secret-9f8e' * 10_000\ndef f(): return password"
        with pytest.raises(UsageError, match=r"^f uses password, a str, which .* holds a secret, and 100,000 bytes is"):
            FunctionModule(session(cell), "f")


FIRST = """
import torch
from mlx_runtime import MlxError, Trainer, load_checkpoint, report, save_checkpoint

rows = torch.ones(4, 1)


class Losses(list):
    pass


def train_func(config):
    losses = Losses()
    for epoch in range((load_checkpoint() or {"epoch": -1})["epoch"] + 1, 3):
        if epoch == 2 and config["fails"]:
            raise ValueError("on purpose")
        losses.append(rows.sum().item() + epoch)
        report(loss=losses[-1])
        save_checkpoint(epoch=epoch)
    return losses


def attempt(**config):
    try:
        (value,) = trainer.run(train_func, config, show=False, resume=resume)
        print(type(value) is Losses, value)
    except MlxError as error:
        print(error)


trainer = Trainer()
"""


@pytest.fixture
def printed_by(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], list[str]]:
    """`printed_by(cells)` executes cells in a kernel of their own, and returns what they have printed."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(cells: list[str]) -> list[str]:
        notebook = new_notebook(cells=[new_code_cell(text) for text in cells])
        NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return [item.text for cell in notebook.cells for item in cell.outputs if item.get("name") == "stdout"]

    return run


KERNELS = (
    [FIRST, "resume = None\nattempt(fails=True)"],
    [FIRST, "resume = 'latest'\nrows = rows * 2", "attempt(fails=False)", "rows = rows / 2", "attempt(fails=False)"],
)


@pytest.mark.examples
def test_cells_train_and_another_kernel_resumes_them_unless_they_were_edited(
    printed_by: Callable[[list[str]], list[str]],
) -> None:
    failed, edited, resumed = (text for cells in KERNELS for text in printed_by(cells))
    assert "ValueError: on purpose (raised on rank 0)" in failed
    assert 'raise ValueError("on purpose")'.replace('"', "'") in failed
    assert edited == (
        "train_func/run_001 was started with another definition of rows. Undo the edits, or start a new run: leave out "
        "resume=\n"
    )
    assert resumed == "True [6.0]\n"  # the last of three epochs


WITH_ROWS = """
import torch
from torch.utils.data import Dataset
from mlx_runtime import MlxError, Trainer, get_dataset_shard, load_checkpoint, save_checkpoint


class Rows(Dataset):
    def __init__(self, count):
        self.values = torch.arange(count)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        return self.values[row]


def train_func(config):
    for step, batch in enumerate(get_dataset_shard().iter_torch_batches(batch_size=2)):
        save_checkpoint(step=step)
        if config["fails"]:
            raise ValueError("on purpose")
    return step


def attempt(**options):
    try:
        print(Trainer().run(train_func, show=False, **options))
    except MlxError as error:
        print(str(error).splitlines()[0])

"""


@pytest.mark.examples
def test_the_dataset_of_a_cell_is_sent_with_its_class(
    printed_by: Callable[[list[str]], list[str]],
) -> None:
    kernels = (
        [WITH_ROWS, "attempt(config={'fails': True}, dataset=Rows(8))"],
        [
            WITH_ROWS,
            "attempt(config={'fails': True}, dataset=Rows(9), resume='latest')",
            "attempt(config={'fails': False}, resume='latest')",
        ],
    )
    failed, other, resumed = (text for cells in kernels for text in printed_by(cells))
    assert failed == "ValueError: on purpose (raised on rank 0)\n"
    assert other.startswith("train_func/run_001 was started with another dataset; leave out dataset= to resume it")
    assert resumed == "[2]\n"  # one of four batches was read before


WITH_SECRETS = """
from types import SimpleNamespace
from mlx_runtime import MlxError, Trainer, load_checkpoint, report, save_checkpoint

TOKEN = "hf_abcdefghijklmnopqrst0123456"
client = SimpleNamespace(api_key="plain-9f8e7d", url="https://example.com")


def train_func(config):
    for epoch in range((load_checkpoint() or {"epoch": -1})["epoch"] + 1, 2):
        if epoch == 1 and config["fails"]:
            raise ValueError("on purpose")
        report(loss=epoch)
        save_checkpoint(epoch=epoch)
    return TOKEN[-3:], client.api_key[-3:], client.url


def attempt(resume=None, **config):
    try:
        print(Trainer(num_workers=2).run(train_func, config, show=False, resume=resume))
    except MlxError as error:
        print(str(error).splitlines()[0])


"""


@pytest.mark.examples
def test_secrets_of_a_cell_reach_workers_and_are_in_no_file(
    printed_by: Callable[[list[str]], list[str]], tmp_path: Path
) -> None:
    """runs/train_func/run_001/ has run.json, conf.yaml, checkpoints, metrics and logs."""
    kernels = ([WITH_SECRETS, "attempt(fails=True)"], [WITH_SECRETS, "attempt(resume='latest', fails=False)"])
    failed, resumed = (text for cells in kernels for text in printed_by(cells))
    assert failed == "ValueError: on purpose (raised on rank 0)\n"
    assert resumed == "[('456', 'e7d', 'https://example.com'), ('456', 'e7d', 'https://example.com')]\n"
    files = [item for item in tmp_path.rglob("*") if item.is_file()]
    assert {"run.json", "conf.yaml", "metrics.jsonl"} <= {item.name for item in files}
    pickled = base64.b64encode(b"plain-9f8e7d").rstrip(b"=")[4:-4]
    for file in files:
        content = file.read_bytes()
        assert not any(text in content for text in (b"hf_abcdefg", b"plain-9f8e7d", pickled)), file
    conf = (tmp_path / "runs" / "train_func" / "run_001" / "conf.yaml").read_text()
    assert "TOKEN: ${oc.env:MLX_VALUE_TOKEN}" in conf
