"""Prepared datasets are found only if code, arguments and data are the same."""

import contextlib
import dataclasses
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from mlx_runtime.companions.prepared import preparation
from mlx_runtime.companions.prepared.columns import load_columns
from mlx_runtime.companions.prepared.fingerprints import Candidate
from mlx_runtime.companions.prepared.store import PreparedSet, Store
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import DatasetError, StorageError
from mlx_runtime.events import Event, Notice

pytestmark = pytest.mark.pure

ORIGINAL = """
    import torch
    from torch.utils.data import Dataset
    from rowsource import scale


    class Rows(Dataset):
        # a comment
        def __init__(self, path: str, factor: int = 1, batch_size: int = 2, folder: str = ""):
            self.values = [int(line) for line in open(path)]
            self.factor, self.batch_size = factor, batch_size

        def __len__(self):
            return len(self.values)

        def __getitem__(self, index):
            return torch.tensor(scale(self.values[index]) * self.factor)

        @staticmethod
        def ray_map_batches(batch):
            return {"x": torch.stack(batch["item"])}


    def unrelated():
        return 1
    """

HELPER = """
    STEP = 3


    def scale(value):
        return value * STEP
    """


def prepared(candidates: list[Candidate], root: str, tell: Callable[[str], None]) -> dict[str, PreparedSet]:
    """Prepare datasets in this process, without workers."""

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            tell(event.text)

    with contextlib.ExitStack() as stack:
        sets = preparation.make(candidates, root, float("inf"), emit, stack)
        return preparation.write(sets, candidates, Topology(0, 1, torch.device("cpu")), 2, emit)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An importable project, with methods to prepare and find its dataset and to edit its modules."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    data = tmp_path / "data.txt"
    data.write_text("\n".join(map(str, range(20))))
    told: list[str] = []

    def edit(module: str, text: str) -> None:
        (tmp_path / f"{module}.py").write_text(dedent(text))
        for name in ("rows", "rowsource"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def candidates(**arguments: object) -> list[Candidate]:
        node = {"_target_": "rows.Rows", "path": str(data), **arguments}
        return [Candidate("train", node, node, 0, tmp_path, str(tmp_path / "runs"))]

    def prepare(**arguments: object) -> list[int]:
        return values(prepared(candidates(**arguments), str(tmp_path / "runs" / "sets"), told.append))

    def find(**arguments: object) -> list[int] | None:
        found = preparation.find(candidates(**arguments), str(tmp_path / "runs" / "sets"), told.append)
        return values(found) if found else None

    def values(sets: dict) -> list[int]:
        item = sets["train"]
        return load_columns(Store(item.root), item.manifest, tmp_path, max_bytes=0)["x"].tolist()

    edit("rows", ORIGINAL)
    edit("rowsource", HELPER)
    yield SimpleNamespace(edit=edit, prepare=prepare, find=find, data=data, told=told, sets=tmp_path / "runs" / "sets")
    edit("rows", "")


def test_a_set_is_prepared_once_and_found(project: SimpleNamespace) -> None:
    assert project.find() is None
    assert project.told == []
    assert project.prepare() == [3 * value for value in range(20)]
    assert project.prepare() == project.find() == [3 * value for value in range(20)]
    assert [line.partition(":")[0] for line in project.told] == ["datasets.train is prepared"]  # once
    assert len(list(project.sets.iterdir())) == 1


def test_what_a_loader_is_told_does_not_make_another_set(project: SimpleNamespace) -> None:
    project.prepare()
    assert project.find(batch_size=7) is not None


def test_other_code_is_another_set(project: SimpleNamespace) -> None:
    project.prepare()
    project.edit("rowsource", HELPER.replace("STEP = 3", "STEP = 4"))
    assert project.find() is None
    assert project.told[-1].startswith("datasets.train: its prepared dataset is stale because its code changed")


@pytest.mark.parametrize(("old", "new"), [("# a comment", "# another"), ("return 1", "return 2")])
def test_comments_and_other_definitions_do_not_count(project: SimpleNamespace, old: str, new: str) -> None:
    project.prepare()
    project.edit("rows", ORIGINAL.replace(old, new))
    assert project.find() is not None


def test_other_data_is_noticed_and_told(project: SimpleNamespace) -> None:
    lines = [*range(10), 99, *range(11, 20)]
    project.prepare()
    project.data.write_text("\n".join(map(str, lines)))
    assert project.find() is None
    assert project.told[-1].startswith("datasets.train: its prepared dataset is stale because its data changed")
    assert project.prepare() == project.find() == [3 * value for value in lines]


def test_folders_that_arguments_name(project: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run changes the storage, which a word that is no path may name, and which lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "images" / "cats"
    images.mkdir(parents=True)
    (tmp_path / ".cache").mkdir()
    (images / "1.png").touch()
    outside = tmp_path.with_name("images_outside")
    outside.mkdir()
    (images / "outside").symlink_to(outside)
    (images / "itself").symlink_to("itself")
    (images / "above").symlink_to(tmp_path.parent)
    for folder in ("runs", ".", "images", "..", "/"):
        project.prepare(folder=folder)
        for changed in ("runs", ".cache"):
            (tmp_path / changed / f"after {ord(folder[-1])}").touch()
        assert project.find(folder=folder) is not None
    (outside / "2.png").touch()
    assert project.find(folder="images") is None
    project.prepare(folder="images")
    images.rename(images.with_name("dogs"))
    assert project.find(folder="images") is None


def test_a_damaged_set_is_reported_and_prepared_again(project: SimpleNamespace) -> None:
    project.prepare()
    for name in ("*.npy", "manifest.json"):
        (file,) = project.sets.glob(f"*/{name}")
        file.write_bytes(file.read_bytes()[:-8])
        assert project.find() is None
        assert project.told[-1].startswith("datasets.train: its prepared dataset is damaged; reading samples. Prepare")
        assert project.prepare() == project.find()
    project.prepare()
    file.unlink()  # as of one that is being written
    told = len(project.told)
    assert project.find() is None
    assert len(project.told) == told


def test_code_that_a_function_imports_when_it_is_called_counts(project: SimpleNamespace) -> None:
    text = ORIGINAL.replace("    from rowsource import scale\n", "")
    line = "            return torch.tensor(scale"
    project.edit("rows", text.replace(line, f"            from rowsource import scale\n{line}"))
    project.prepare()
    project.edit("rowsource", HELPER.replace("STEP = 3", "STEP = 4"))
    assert project.find() is None


class Fixed(Dataset):
    def __init__(self, rows: int = 10):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor([float(index)])

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Flipped(Fixed):
    prepare = False


class Noisy(Fixed):
    def __getitem__(self, index):
        return torch.rand(1)


class Titled(Fixed):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"]), "title": ["one"] * len(batch["item"])}


class Changing(Fixed):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(IterableDataset):
    def __len__(self):
        return 100

    def __iter__(self):
        return (torch.tensor([float(row)]) for row in range(100))

    ray_map_batches = staticmethod(Fixed.ray_map_batches)


def opened_stream() -> Stream:
    return Stream()


class Opened(Fixed):
    """Opens its file when it reads the first row, as h5py and tarfile do."""

    file = None

    def __init__(self):
        super().__init__(100)

    def __getitem__(self, index):
        if self.file is None:
            self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            self.file.write(b"".join(b"%04d" % row for row in range(self.rows)))
        self.file.seek(4 * index)
        time.sleep(0.001)
        return torch.tensor([float(self.file.read(4))])


Make = Callable[[Callable], dict]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(cls: Callable) -> dict:
        node = {"_target_": f"{__name__}.{cls.__name__}"}
        candidate = Candidate("train", node, node, 0, Path(__file__).parent)
        return prepared([candidate], str(tmp_path), print)

    return make


def test_a_dataset_that_declines_is_not_prepared(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(Flipped) == make(Changing) == make(Stream) == {}
    assert capsys.readouterr().out == (
        "datasets.train is not prepared: Flipped.prepare is False\n"
        "datasets.train is not prepared: Changing has set_epoch, so its rows may differ by epoch\n"
        "datasets.train is not prepared: Stream is a stream\n"
    )


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Noisy, r"datasets.train cannot be prepared: a row changes each time it is read. Set prepare = False in Noisy"),
        (
            Titled,
            r"datasets.train cannot be prepared: 'title' is a list, and only tensors are stored. "
            r"Leave it out of ray_map_batches, or set prepare = False in Titled",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    make: Make, tmp_path: Path, cls: type, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        make(cls)
    assert Store(str(tmp_path)).entries() == []


def test_a_stream_that_a_function_opens_is_prepared_in_its_order(make: Make, tmp_path: Path) -> None:
    item = make(opened_stream)["train"]
    columns = load_columns(Store(item.root), item.manifest, tmp_path, max_bytes=0)
    assert columns["x"].flatten().tolist() == [*range(100)]
    assert make(opened_stream)["train"] == item


def test_a_worker_that_does_not_see_the_store_is_refused(tmp_path: Path) -> None:
    node = {"_target_": f"{__name__}.Fixed"}
    candidates = [Candidate("train", node, node, 0, Path(__file__).parent)]
    with contextlib.ExitStack() as stack:
        sets = preparation.make(candidates, str(tmp_path / "driver"), float("inf"), lambda _: None, stack)
        elsewhere = {"train": dataclasses.replace(sets["train"], root=str(tmp_path / "worker"))}
        with pytest.raises(StorageError, match=r"rank 0 on \S+ cannot read .*worker; cfg.preparation.path must be a "):
            preparation.write(elsewhere, candidates, Topology(0, 1, torch.device("cpu")), 2, lambda _: None)


@pytest.mark.local
def test_reading_processes_open_their_own_files(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "NOT_WORTH_A_PROCESS_S", 1e-6)
    item = make(Opened)["train"]
    columns = load_columns(Store(item.root), item.manifest, tmp_path, max_bytes=0)
    assert columns["x"].flatten().tolist() == [*range(100)]
