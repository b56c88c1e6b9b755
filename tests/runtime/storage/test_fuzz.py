"""Any content of a file that commands read, and any argument, causes at most one clear line of error."""

import contextlib
import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile
import pytest
from click.testing import CliRunner
from hostile import BROKEN_JSON
from torch import nn

from mlx_runtime import BaseModule, TrainConfig, load_config, open_run
from mlx_runtime.cli import mlx as command
from mlx_runtime.companions.prepared.store import Manifest
from mlx_runtime.companions.sharding.shards import ShardedTensors
from mlx_runtime.companions.sweeps import space
from mlx_runtime.errors import MlxError, StorageError
from mlx_runtime.runs import records, snapshots
from mlx_runtime.runs.checkpoints.index import ABOUT, STATE, read_description
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.documents import DEPTH, Kind
from mlx_runtime.storage.files import storage_at

pytestmark = pytest.mark.process

LONGEST_S = 60.0
"""Maximum time of all commands for one input, the first of which may import libraries."""

ALL = "MLX_FUZZ" in os.environ
"""Try all combinations instead of a sample of them."""

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 10**400, 0.5, float("inf"), float("-inf"), float("nan"), "", "text", "x" * 100_000),
    *("\x1b[31m\x00\r\n", "\ud800", "2026-01-01", "9999-12-31T23:59:59+23:59", "../../..", [], [None], ["a"], {}),
    *({"": None}, {"id": 1, "address": []}, {"epoch": "1"}, {"epoch": 1, "path": 3}, {"commit": 5}, {"a": {"b": [1]}}),
    [[[[[[[[[[]]]]]]]]]],
)
"""Values of wrong types for a field."""

BOMB = b"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (level, level, b",".join([b"*a%d" % (level - 1)] * 10)) for level in range(1, 12)
)

BROKEN_YAML: tuple[bytes, ...] = (
    *(b"", b"null", b"5", b"text", b"[]", b"- a\n- b", b"a: [", b"a: {", b'a: "', b"a: b: c", b"\ta: 1", b"a\nb: 1"),
    *(b"\x00", b"a: \x07", b"\xff\xfe", b"a: \xe9", "cfg: {name: é}".encode("latin-1"), "a: 1".encode("utf-16")),
    *(BOMB, b"a: &x {b: *x}", b"a: &x [*x]", b"a: *nobody", b"<<: *x", b"a: &x {<<: *x}", b"a: &a\nb: *a"),
    *(b"[" * 50_000, b"{a: " * 50_000, b"- " * 20_000, b"a: " + b"[" * (DEPTH - 2) + b"]" * (DEPTH - 2), b"? " * 9_000),
    *(b"1: 2", b"null: 1", b"true: 1", b"1.5: 1", b"? [a]\n: 1", b"? {a: 1}\n: 1", b"a: 1\na: 2", b"--- 1\n--- 2"),
    *(b"a: 1e999", b"a: -.inf", b"a: .nan", b"a: " + b"9" * 5_000, b"a: 0x", b"a: !!int x", b"a: !!binary x"),
    *(b"a: !!python/object/apply:os.system [true]", b"a: !!set {b}", b"a: !!timestamp 3", b"%YAML 9.9\n---\na: 1"),
    *(b"a: ${b}", b"a: ${a}", b"a: ${", b"a: ${nobody:1}", b"a: ${oc.env:NOT_SET_ANYWHERE}", b"a: ${oc.env:}"),
    *(b"cfg:", b"cfg: 5", b"cfg: []", b"cfg: {storage_path: [a]}", b"cfg: {storage_path: {a: b}, name: [1]}"),
    *(b"cfg: {storage_path: ${cfg}, name: ${cfg.name}}", b"cfg: {storage_path: '\\0'}", b'cfg: {storage_path: "\\0"}'),
    *(b"cfg: {storage_path: true}", b"cfg: {storage_path: ''}", b"cfg: {storage_path: 's3://'}", b"cfg: {1: 2}"),
    *(
        b"cfg: {storage_path: 'nothing://x', preparation: {path: 5}}",
        b"cfg: {storage_path: '~nobody/x'}",
        b"cfg: {name: ..}",
    ),
    *(b"cfg: {storage_path: " + b"x" * 5_000 + b"}", b"models: {_target_: 5}", b"models: {_target_: os.system}"),
)

WORDS = (
    *("", " ", ".", "..", "../..", "/", "//", "/etc", "~", "*", "?", "a?b", "a b", "-", "--", "---", "=", "a=b", "-1"),
    *("latest", "0", "run_001", "9" * 400, "x" * 5_000, "é", "\u202e", "\n", "\x1b[2J", "\x00", "\ud800", "%s", "{}"),
    *("digits/", "/digits", "digits/9", "digits/../digits/run_001", "digits/run_001/../..", "digits/run_001\n", "${x}"),
    *("digits//run_001", "s3://", "s3:///", "file://", "nothing://x", "http://x/y/z", "\u0663", "\u00b2", "run_\u0663"),
)
"""Odd names of experiments, runs and paths."""


RECORD = {
    "experiment": "digits",
    "run": "run_001",
    "status": "FAILED",
    "start": "2026-11-20T10:00:00+00:00",
    "heartbeat": "2026-11-20T10:00:00+00:00",
    "monitor": "val/loss",
    "mode": "min",
    "metrics": {"val/loss": 1.0},
}
CHECKPOINT = {
    "epoch": 0,
    "finished": True,
    "global_step": 5,
    "metrics": {"val/loss": 0.5},
    "sha256": "",
    "size_bytes": 0,
}


def variants(good: dict[str, Any], names: Iterable[str], shape: Mapping[str, Kind] = {}) -> list[bytes]:
    """Return a valid document with each field replaced by each odd value.

    Of fields of the same kind in the shape, a sample has each value in one of them.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(shape[name].title if name in shape else name, []).append(name)
    fields = [
        (name, odd)
        for alike in kinds.values()
        for number, odd in enumerate(ODD)
        for name in (alike if ALL else [alike[number % len(alike)]])
    ]
    return [json.dumps(good | {name: odd}).encode() for name, odd in fields]


def sampled(documents: list[bytes]) -> list[bytes]:
    """Return the broken documents and every second variant: each value in half of the fields (their number is odd)."""
    return documents if ALL else documents[: len(BROKEN_JSON)] + documents[len(BROKEN_JSON) :: 2]


assert len(ODD) % 2 == 1

RECORDS = [*BROKEN_JSON, *variants(RECORD, records.SHAPE, records.SHAPE)]
CHECKPOINTS = [*BROKEN_JSON, *variants(CHECKPOINT, [*CHECKPOINT, "file", "unknown"])]
PIECE = {"offsets": [0], "sizes": [1], "file": "s", "start": 0, "sha256": ""}
TENSOR = {"dtype": "F32", "shape": [1], "pieces": [PIECE]}


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of digits, the first with a checkpoint, and a data job; the working directory is empty."""
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path / "runs"))
    monkeypatch.setenv("MLX_CACHE", str(tmp_path / "cache"))
    for number in (1, 2):
        folder = tmp_path / f"runs/digits/run_{number:03d}"
        (folder / "checkpoints/epoch_0001").mkdir(parents=True)
        (folder / ".attempt-001").mkdir()
        (folder / "run.json").write_text(json.dumps(RECORD | {"run": folder.name}))
        (folder / "conf.yaml").write_text("cfg: {seed: 0, monitor: val/loss, mode: min}")
        (folder / "checkpoints/epoch_0001" / ABOUT).write_text(json.dumps(CHECKPOINT))
        (folder / "checkpoints/epoch_0001" / STATE).write_bytes(b"")
    (tmp_path / "runs/data").mkdir()
    (tmp_path / "runs/data/job.json").write_text(json.dumps({"status": "SUCCEEDED", "files": 0}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "runs"


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of everything in a folder."""
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {path: (facts.st_size if Path(path).is_file() else 0, facts.st_mtime_ns) for path, facts in found.items()}


def mlx(*words: str) -> tuple[int, str]:
    """Run a command in this process and answer no; fail unless it ends as a command should."""
    done = CliRunner().invoke(command, words, input="n\n", prog_name="mlx")
    context = f"mlx {' '.join(map(ascii, words))[:200]}: {done.exception!r}: {done.stderr[-1000:]}"
    assert done.exception is None or isinstance(done.exception, SystemExit), context
    assert done.exit_code in (0, 1, 2), context
    told = [line for line in done.stderr.splitlines() if line and not line.startswith("warning: ")]
    if done.exit_code and not told[0].startswith("Usage:"):
        assert len(told) == 1, context
        assert told[0].startswith("error: "), context
    return done.exit_code, done.stdout


def each(storage: Path, inputs: Sequence[Any], act: Callable[[Any], None]) -> None:
    """Call a function with each input, within a time limit, and assert that the storage does not change."""
    problems = []
    for item in inputs:
        started = time.monotonic()
        try:
            act(item)
            assert time.monotonic() - started < LONGEST_S, "it takes long"
        except (Exception, pytest.fail.Exception) as error:
            problems.append(f"{item!r:.200}: {error!s:.600}")
    assert not problems, "\n\n".join(problems)


def untouched(storage: Path, *commands: Sequence[str]) -> None:
    """Run commands that only read, or refuse."""
    before = files(storage)
    for words in commands:
        mlx(*words)
        assert files(storage) == before, words


def test_records(storage: Path, tmp_path: Path) -> None:
    """Each batch of records is listed at once; then each run meets one of the other commands, or all (`MLX_FUZZ=1`)."""
    page = str(tmp_path / "page.html")
    good = (storage / "digits/run_002/run.json").read_bytes()
    others: list[Callable[[str], tuple[str, ...]]] = [
        lambda run: ("xp", "diff", f"digits/{run}", "digits/2"),
        lambda run: ("xp", "compare", f"digits/{run}", "digits/2"),
        lambda run: ("xp", "report", "digits", run, "-o", page),
        *(lambda run, verb=verb: ("xp", verb, "digits", run) for verb in ("stop", "rm", "logs")),  # type: ignore[misc]
        lambda run: ("data", "rm", f"digits/{run}"),
    ]

    def act(batch: list[bytes]) -> None:
        runs = [f"run_{number:03d}" for number in range(3, 3 + len(batch))]
        for run, content in zip(runs, batch, strict=True):
            (storage / "digits" / run).mkdir(exist_ok=True)
            (storage / "digits" / run / "run.json").write_bytes(content)
        assert (storage / "digits/run_002/run.json").read_bytes() == good
        code, listed = mlx("xp", "ls")
        assert (code, listed.count("run_002")) == (0, 1)
        code, found = mlx("xp", "ls", "--json")
        assert (code, {row["run"] for row in json.loads(found)}) == (0, {"run_001", "run_002", *runs})
        assert mlx("xp", "best", "digits")[0] in (0, 2)  # the runs may monitor nothing in common
        assert mlx("data", "show")[0] == 0
        before = files(storage)
        for number, run in enumerate(runs):
            for other in others if ALL else [others[number % len(others)]]:
                mlx(*other(run))
        assert files(storage) == before
        for run in runs:
            shutil.rmtree(storage / "digits" / run)

    size = 25  # no multiple of the number of values, so that each of them meets several commands
    each(storage, [RECORDS[start : start + size] for start in range(0, len(RECORDS), size)], act)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "huge": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**12),
    "loop": lambda path: path.symlink_to(path),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_documents_that_are_no_files(storage: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command waits for a pipe, reads a device for ever, or fills the memory."""
    monkeypatch.chdir(storage)  # the path of a socket is short
    for name in ("run.json", "conf.yaml", f"checkpoints/epoch_0001/{ABOUT}", "../../data/job.json"):
        file = Path("digits/run_001", name)
        content = file.read_bytes()
        file.unlink()
        IRREGULAR[kind](file)
        code, listed = mlx("xp", "ls")
        assert (code, listed.count("run_001"), listed.count("run_002")) == (0, 1, 1)
        assert ("UNREADABLE" in listed) == (name == "run.json")
        assert mlx("data", "show")[0] == 0
        run = ("digits", "run_001")
        mlx("xp", "best", "digits")
        mlx("xp", "report", *run, "-o", str(tmp_path / "page.html"))
        pairs = [("xp", verb, "digits/1", "digits/2") for verb in ("diff", "compare")]
        for words in (*pairs, ("xp", "rm", *run), ("data", "rm", "data")):
            mlx(*words)
        for read in (lambda found: found.record, lambda found: found.config, lambda found: found.state()):
            with contextlib.suppress(MlxError):
                read(open_run(storage / "digits/run_001"))
        file.rmdir() if kind == "folder" else file.unlink()
        file.write_bytes(content)


def test_checkpoints(storage: Path, tmp_path: Path) -> None:
    def act(content: bytes) -> None:
        (storage / "digits/run_001/checkpoints/epoch_0001" / ABOUT).write_bytes(content)
        untouched(
            storage,
            ("xp", "best", "digits"),
            ("xp", "report", "digits", "1", "-o", str(tmp_path / "page.html")),
        )
        for which in ("latest", "best"):
            with pytest.raises(MlxError):
                open_run(storage / "digits/run_001").state(which)

    each(storage, sampled(CHECKPOINTS), act)


def test_configs_of_runs(storage: Path, tmp_path: Path) -> None:
    def act(content: bytes) -> None:
        (storage / "digits/run_001/conf.yaml").write_bytes(content)
        assert mlx("xp", "ls")[0] == 0
        page = ("xp", "report", "digits", "1", "-o", str(tmp_path / "page.html"))
        untouched(storage, *(("xp", verb, "digits/1", "digits/2") for verb in ("diff", "compare")), page)
        with contextlib.suppress(StorageError):
            assert isinstance(open_run(storage / "digits/run_001").config, dict)

    each(storage, BROKEN_YAML, act)


def test_names_in_documents(tmp_path: Path) -> None:
    """Every field that becomes part of a path is refused where it is read, unless it is a name."""
    manifest = {"name": "a", "rows": 1, "size_bytes": 4, "dataset": "D", "arguments": {}, "created": ""}
    trial, of_sweep = {"trial": 1, "values": {}}, {"trial": 1}

    def shards(name: Any) -> None:
        index = {"tensors": {"t": TENSOR | {"pieces": [PIECE | {"file": name}]}}}
        ShardedTensors(storage_at(str(tmp_path)), "a", json.dumps(index).encode())

    def checkpoint(field: str, name: Any) -> None:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / ABOUT).write_text(json.dumps(CHECKPOINT | {field: name}))
        if read_description(storage_at(str(tmp_path)), "a") is None:
            raise ValueError

    def record(**fields: Any) -> None:
        records.parse_record(json.dumps(RECORD | fields).encode())

    readers: dict[str, Callable[[Any], object]] = {
        "experiment": lambda name: record(experiment=name),
        "run": lambda name: record(run=name),
        "sweep": lambda name: record(sweep=of_sweep | {"name": name}),
        "runs": lambda name: record(trials=[trial | {"runs": [name]}]),
        "file": lambda name: checkpoint("file", name),
        "index": lambda name: checkpoint("index", name),
        "part": shards,
        "dataset": lambda name: Manifest.parse(json.dumps(manifest | {"name": name, "columns": {}}).encode()),
        "column": lambda name: Manifest.parse(
            json.dumps(manifest | {"columns": {"x": [name, "float32", []]}}).encode()
        ),
    }
    for title, read in readers.items():
        read({"runs": "run_001", "part": "s"}.get(title, "name-1.x"))
        for name in hostile.names(tmp_path / "outside"):
            if name is None and title in ("runs", "index"):
                continue  # a run that has not started, a checkpoint without shards
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                read(name)
            assert "\n" not in str(caught.value), (title, name)


def test_names_in_stored_code(storage: Path, tmp_path: Path) -> None:
    folder = storage / "digits/run_001"
    before = hostile.tree(tmp_path)

    def archive(**members: bytes) -> None:
        with zipfile.ZipFile(folder / snapshots.CODE, "w", zipfile.ZIP_DEFLATED) as code:
            for name, content in members.items():
                code.writestr(zipfile.ZipInfo(name), content)

    for name in hostile.TEXTS:
        if not name or hostile.is_path(name) or not name.isprintable():  # zipfile cannot write those
            continue
        archive(**{"src/__init__.py": b"", name: b"theirs"})
        with pytest.raises(StorageError, match=r"code\.zip is damaged: it names .*, which is not a path below"):
            snapshots.unpack(RunFolder(folder))
    archive(**{"src/big.py": bytes(snapshots.ALL_BYTES + 1)})
    with pytest.raises(StorageError, match="damaged: its files have more than"):
        snapshots.unpack(RunFolder(folder))
    for content in (b"", b"PK", b"PK\5\6" + bytes(18)[:7], (folder / snapshots.CODE).read_bytes()[:-30]):
        (folder / snapshots.CODE).write_bytes(content)
        with pytest.raises(StorageError):
            snapshots.unpack(RunFolder(folder))
    (folder / snapshots.CODE).unlink()
    assert {path: facts[2] for path, facts in hostile.tree(tmp_path).items()} == {
        path: facts[2] for path, facts in before.items()
    }


VALUES = (
    *("choice(a,b),c", "1,choice(2,3)", "interval(1,2),3", "range(1,10,nan)", "range(inf,1)", "interval(1,nan)"),
    *("\ud800", "'\ud800'", "${oc.env:\ud800}", "{\ud800:1}", "[" * 500 + "]" * 500, "{" * 100, "glob(*)", "\0"),
    *("{_target_:'..'}", "{_target_:''}", "{_target_:5}", "{_target_:os.system}", "[1,{a:b}]", "{a:{b:c}}", "${a}"),
    *("nan", "1e400", str(10**23), "null", "'\n'", "x" * 10_000, "'a\0b'", "???"),
    *("int(nan)", "sort(1,2)", "", "' '", "${"),
)
"""Values of overrides."""

KEYS = ("cfg.seed", "cfg.name", "cfg.storage_path", "cfg.cross_validation.splitter", "models.net", "\ud800", "cfg")


def test_overrides(storage: Path, tmp_path: Path) -> None:
    """Overrides of runs are refused with the key or the text; those of sweeps, too."""
    conf = tmp_path / "here/conf.yaml"
    net = "{_target_: torch.nn.Linear, in_features: 2, out_features: 2, bias: true}"
    models = f"{{_target_: {__name__}.Models, net: {net}}}"
    conf.write_text(f"cfg: {{_target_: mlx_runtime.TrainConfig, name: digits, storage_path: x}}\nmodels: {models}\n")
    assert load_config(Small, ["models.net.bias=false", "++cfg.seed=5"], conf).cfg.seed == 5
    pairs = [(key, value) for key in KEYS for value in VALUES]
    chosen = pairs if ALL else [(KEYS[number % len(KEYS)], value) for number, value in enumerate(VALUES)]

    def act(pair: tuple[str, str]) -> None:
        text = "++{}={}".format(*pair)
        for read in (lambda: space.parse([text]), lambda: load_config(Small, [text], conf)):
            problem = ""
            try:
                read()
            except MlxError as error:
                problem = str(error)
            assert "\n" not in problem or " problems:\n" in problem
            assert "\ud800" not in problem, "half of a surrogate pair"

    each(storage, chosen, act)


@dataclass
class Models:
    net: nn.Linear = nn.Linear(2, 2)


class Small(BaseModule):
    cfg: TrainConfig
    models: Models


def test_configs_to_train_with(storage: Path, tmp_path: Path) -> None:
    conf = tmp_path / "here/conf.yaml"

    def act(content: bytes) -> None:
        conf.write_bytes(content)
        with pytest.raises(MlxError):
            load_config(Small, [], conf)

    each(storage, BROKEN_YAML, act)


def test_words(storage: Path, tmp_path: Path) -> None:
    def act(word: str) -> None:
        one = [("xp", verb, word) for verb in ("ls", "best", "stop", "rm", "logs")]
        two = [("xp", verb, "digits", word) for verb in ("stop", "rm", "logs")]
        other = [("xp", "ls", "--sort", word), ("xp", "best", "digits", "--metric", word), ("xp", "diff", word, word)]
        other.append(("xp", "compare", word, word))
        report = ("xp", "report", word, "-o", str(tmp_path / "nowhere/page.html"))
        untouched(tmp_path, *one, *two, *other, report, ("data", "show", word), ("data", "rm", word))

    each(storage, WORDS, act)
