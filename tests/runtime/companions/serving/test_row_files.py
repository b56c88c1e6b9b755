"""Files of rows that predictions are made for, and files of predictions."""

import contextlib
import json
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from mlx_runtime.companions.serving.predictions import offline
from mlx_runtime.companions.serving.predictions.parts import Parts, part_name
from mlx_runtime.companions.serving.predictions.results import (
    array_of,
    join,
    refuse_columns,
    rows_of_part,
    table_of,
    write_part,
)
from mlx_runtime.companions.serving.predictions.sources import select
from mlx_runtime.companions.serving.predictions.tables import checked, open_rows
from mlx_runtime.companions.serving.predictor import PredictError
from mlx_runtime.companions.serving.schema import Column, RowError
from mlx_runtime.errors import ConfigError, MlxError, UsageError

pytestmark = pytest.mark.pure

IMAGE = Column("image", "float32", (1, 2, 3))
NUMBERS = (Column("height", "float32"), Column("count", "int64"), Column("text", "string"), Column("wet", "bool"))

IMAGES = np.arange(20 * 6, dtype=np.float32).reshape(20, 1, 2, 3) / 7


def parquet_file(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=7)
    return path


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def images_in(kind: str, folder: Path) -> Path:
    """Write the images to a file of some kind."""
    path = folder / f"rows.{kind.rpartition(' ')[2]}"
    match kind:
        case "nested parquet":
            parquet_file(path, image=pa.array(IMAGES.tolist()), label=list(range(20)))
        case "tensor parquet":
            parquet_file(path, image=array_of(IMAGES))
        case "jsonl":
            lines(path, [{"image": image.tolist(), "label": 3} for image in IMAGES] + [""])
        case "npy":
            np.save(path, IMAGES)
        case "float64 npz":
            np.savez_compressed(path, image=IMAGES.astype(np.float64), label=np.arange(20))
    return path


def read(path: Path, columns: Sequence[Column], parts: Sequence[tuple[int, int]], size: int = 4) -> list[Any]:
    """Read parts of a file, given by their first row and number of rows; return the checked batches."""
    with contextlib.closing(open_rows(path, columns, (), size)) as file:
        return [checked(file.read(start, count)[1], columns, path, start) for start, count in parts]


@pytest.mark.parametrize("kind", ["nested parquet", "tensor parquet", "jsonl", "npy", "float64 npz"])
def test_rows_are_read_forward_from_any_row(kind: str, tmp_path: Path) -> None:
    path = images_in(kind, tmp_path)
    for parts in ([(0, 20)], [(0, 5), (5, 5), (10, 5), (15, 9)], [(3, 4), (12, 4)], [(15, 2)]):
        found = read(path, [IMAGE], parts)
        assert [item["image"].dtype for item in found] == [torch.float32] * len(parts)
        for item, (start, count) in zip(found, parts, strict=True):
            assert np.array_equal(item["image"], IMAGES[start : start + count]), (parts, start)
    assert open_rows(path, [IMAGE], (), 4).read(20, 4)[0] == 0


def test_numbers_and_texts_in_csv(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"id": [7, 8], "height": [1, 2.5], "count": [3, 4], "text": ["a,b", "c\nd"]})
    frame["wet"] = [True, False]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    file = open_rows(tmp_path / "rows.csv", NUMBERS, ("id",), 8)
    size, values = file.read(0, 8)
    assert (size, values["id"]) == (2, ["7", "8"])
    batch = checked(values, NUMBERS, tmp_path, 0)
    assert {name: list(map(str, value)) for name, value in batch.items()} == {
        "height": ["tensor(1.)", "tensor(2.5000)"],
        "count": ["tensor(3)", "tensor(4)"],
        "text": ["a,b", "c\nd"],
        "wet": ["tensor(True)", "tensor(False)"],
    }


def test_rows_of_different_shapes_are_lists(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2]}, {"ids": [3]}]
    column = Column("ids", "int64", (None,))
    for path in (lines(tmp_path / "r.jsonl", rows), parquet_file(tmp_path / "r.parquet", ids=[[1, 2], [3]])):
        ((batch),) = read(path, [column], [(0, 2)])
        assert [row.tolist() for row in batch["ids"]] == [[1, 2], [3]]


BAD_ROWS = {
    "not JSON": ("{", "row 2 is not JSON: Expecting property name"),
    "a list": ("[1]", "row 2 is a list; expected a JSON object"),
    "missing": ({"label": 1}, "row 2: image is missing; expected float32 (1, 2, 3)"),
    "a shape": ({"image": [1.0]}, "row 2: image has shape (1,); expected float32 (1, 2, 3)"),
    "NaN": ({"image": [[[1, 2, 3], [4, 5, float("nan")]]]}, "row 2: image holds NaN or infinity"),
    "text": ({"image": "x"}, "row 2: image is 'x'; expected float32 (1, 2, 3)"),
    "null": ({"image": None}, "row 2: image is null; expected float32 (1, 2, 3)"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    row, message = BAD_ROWS[name]
    good = {"image": IMAGES[0].tolist()}
    path = lines(tmp_path / "rows.jsonl", [good, "", good, row, good])
    with pytest.raises(RowError) as caught:
        read(path, [IMAGE], [(0, 1), (1, 3)])
    assert str(caught.value).startswith(f"{path}: {message}")


def test_values_of_csv_and_parquet_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("height,count,text,wet\n1,2,a,true\n1,2.5,a,true\n")
    with pytest.raises(RowError, match=r"rows.csv: row 1: count is float64; expected int64|count is 2.5"):
        read(tmp_path / "rows.csv", NUMBERS, [(0, 2)])
    (tmp_path / "rows.csv").write_text("height,count,text,wet\n1,2,a,true\nx,2,a,true\n")
    with pytest.raises(RowError, match=r"rows.csv: row 1: height is 'x'; expected float32"):
        read(tmp_path / "rows.csv", NUMBERS, [(0, 2)])
    path = parquet_file(tmp_path / "rows.parquet", image=[*IMAGES[:8].tolist(), None])
    with pytest.raises(RowError, match=r"rows.parquet: row 8: image is null"):
        read(path, [IMAGE], [(0, 4), (4, 6)])


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    problems = {}
    for name in ("a.parquet", "a.npy", "a.npz", "a.csv"):
        (tmp_path / name).write_bytes(b"\x00\xff\xfe binary\n\x80,\n")
        with pytest.raises(UsageError) as caught:
            open_rows(tmp_path / name, [IMAGE], (), 4)
        problems[name] = str(caught.value).removeprefix(f"{tmp_path}/")
        assert "\n" not in problems[name]
    assert problems["a.parquet"].startswith("a.parquet is not a valid Parquet file: Parquet magic bytes not found")
    assert problems["a.npy"].startswith("a.npy is not a valid NumPy file: the magic string is not correct")
    assert problems["a.npz"] == "a.npz is not a valid NumPy file: File is not a zip file"
    assert problems["a.csv"].startswith("a.csv ")
    np.save(tmp_path / "o.npy", np.array([{}, None]), allow_pickle=True)
    np.save(tmp_path / "f.npy", np.asfortranarray(IMAGES))
    with (tmp_path / "n.npy").open("wb") as file:  # a size of -1 would be read as that of the whole file
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (20, -1)})
        file.write(IMAGES.tobytes())
    wrong = {"o.npy": "it holds object", "f.npy": "in C order", "n.npy": "in C order", "no.npy": "No such file"}
    for name, problem in wrong.items():
        with pytest.raises(UsageError, match=problem):
            open_rows(tmp_path / name, [IMAGE], (), 4)
    with pytest.raises(UsageError, match="it is cut off"):
        read(cut(images_in("npy", tmp_path)), [IMAGE], [(0, 20)])


def test_missing_columns(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "rows.parquet", picture=[1], id=[2])
    with pytest.raises(UsageError) as caught:
        open_rows(path, [IMAGE], (), 4)
    assert str(caught.value) == f"{path} lacks image (float32 (1, 2, 3)); its columns are picture, id"
    with pytest.raises(UsageError, match=r"lacks ids, named by --keep. Did you mean 'id'\?"):
        open_rows(path, [Column("picture", "int64")], ("ids",), 4)
    np.savez(tmp_path / "rows.npz", image=IMAGES, label=[1])
    with pytest.raises(UsageError, match="columns have different numbers of rows: {'image': 20, 'label': 1}"):
        open_rows(tmp_path / "rows.npz", [IMAGE], ("label",), 4)
    with pytest.raises(UsageError, match=r"holds one column, but image, id are needed; use .npz"):
        open_rows(images_in("npy", tmp_path), [IMAGE], ("id",), 4)
    (tmp_path / "rows.csv").write_text("image\n1\n")
    with pytest.raises(UsageError, match=r"CSV cannot hold image, float32 \(1, 2, 3\); use Parquet"):
        open_rows(tmp_path / "rows.csv", [IMAGE], (), 4)


def test_columns_that_occur_twice(tmp_path: Path) -> None:
    """Which of them `predict` should read is not known."""
    for suffix in (".parquet", ".csv", ".npz", ".jsonl"):
        path = tmp_path / f"rows{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pa.table([[1], [2], [3]], ["id", "count", "count"]), path)
        elif suffix == ".npz":
            with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name in ("id", "count", "count"):
                    archive.writestr(f"{name}.npy", (images_in("npy", tmp_path)).read_bytes())
        else:
            path.write_text("id,count,count\n1,2,3\n" if suffix == ".csv" else '{"id": 1, "count": 2, "count": 3}\n')
        with pytest.raises(UsageError, match=r"2 columns count; rename|row 0 .* one of the columns id, count twice"):
            read(path, [Column("count", "int64")], [(0, 1)])


OUTPUTS = {
    "digit": torch.arange(5),
    "scores": torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7,
    "mask": torch.arange(30).reshape(5, 2, 3) % 2 == 0,
    "half": torch.arange(5, dtype=torch.bfloat16) / 3,
}


def joined(folder: Path, suffix: str, *outputs: dict[str, Any], kept: dict[str, Any] | None = None) -> Path:
    """Write the outputs of blocks, each as one batch, and join them."""
    paths = []
    for number, block in enumerate(outputs):
        paths.append(folder / f"{number}.arrow")
        table = table_of({name: [value] for name, value in block.items()}, kept or {})
        write_part(paths[-1], table)
        assert rows_of_part(paths[-1]) == len(table)
    join(paths, folder / f"out{suffix}", folder / "temporary")
    assert not (folder / "temporary").exists()
    return folder / f"out{suffix}"


def blocks(*names: str) -> list[dict[str, torch.Tensor]]:
    return [{name: OUTPUTS[name][part] for name in names} for part in (slice(0, 3), slice(3, 5))]


def test_parquet_and_numpy_hold_all_outputs(tmp_path: Path) -> None:
    wanted = {name: value.float().numpy() if name == "half" else value.numpy() for name, value in OUTPUTS.items()}
    path = joined(tmp_path, ".parquet", *blocks(*OUTPUTS))
    frame, table = pandas.read_parquet(path), parquet.read_table(path)
    assert frame["digit"].dtype == np.int64
    assert np.array_equal(np.stack(frame["scores"]), wanted["scores"])
    assert np.array_equal(np.stack(frame["mask"]).reshape(-1, 2, 3), wanted["mask"])
    assert table.schema.field("mask").type.shape == [2, 3]
    assert np.array_equal(frame["half"], wanted["half"])
    with np.load(joined(tmp_path, ".npz", *blocks(*OUTPUTS))) as arrays:
        assert {name: (value.dtype, value.tolist()) for name, value in arrays.items()} == {
            name: (value.dtype, value.tolist()) for name, value in wanted.items()
        }
    array = np.load(joined(tmp_path, ".npy", *blocks("mask")))
    assert (array.dtype, array.tolist()) == (bool, wanted["mask"].tolist())


def test_json_lines_and_csv(tmp_path: Path) -> None:
    path = joined(
        tmp_path, ".jsonl", *blocks("digit", "mask"), {"digit": torch.tensor([9]), "mask": OUTPUTS["mask"][:1]}
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["digit"] for row in rows] == [0, 1, 2, 3, 4, 9]
    assert rows[1]["mask"] == OUTPUTS["mask"][1].tolist()
    path = joined(tmp_path, ".jsonl", {"x": torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])})
    assert path.read_text() == '{"x": [1.0, null]}\n{"x": [null, 2.0]}\n'
    path = joined(tmp_path, ".csv", {"digit": torch.tensor([1, 2])}, kept={"id": [["a", "b"]]})
    assert path.read_text() == '"digit","id"\n1,"a"\n2,"b"\n'


def test_outputs_of_different_shapes_are_lists_of_any_length(tmp_path: Path) -> None:
    first, second = {"x": torch.ones(2, 3)}, {"x": [torch.zeros(1), torch.zeros(2)]}
    path = joined(tmp_path, ".parquet", first, second, {"x": torch.ones(1, 1)})
    assert pandas.read_parquet(path)["x"].map(list).tolist() == [[1, 1, 1], [1, 1, 1], [0], [0, 0], [1]]
    matrices = {"x": torch.ones(1, 2, 2)}, {"x": torch.zeros(1, 1, 2)}
    path = joined(tmp_path, ".jsonl", *matrices)
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [[[1, 1], [1, 1]], [[0, 0]]]
    with pytest.raises(UsageError, match=r"NumPy cannot hold x, list<\w+: list<\w+: float>>; write .parquet"):
        joined(tmp_path, ".npz", *matrices)
    with pytest.raises(MlxError, match="predict returned x as int64 for some rows, and as float for others"):
        joined(tmp_path, ".parquet", {"x": torch.ones(1).long()}, {"x": torch.ones(1)})
    with pytest.raises(MlxError, match="predict returned x for some rows, and y for others"):
        joined(tmp_path, ".parquet", {"x": torch.ones(1)}, {"y": torch.ones(1)})


def test_kept_columns(tmp_path: Path) -> None:
    path = joined(tmp_path, ".parquet", blocks("digit")[0], kept={"id": [["a", None], ["c"]], "n": [np.arange(3)]})
    frame = pandas.read_parquet(path)
    assert frame["n"].tolist() == [0, 1, 2]
    assert frame["id"].tolist()[::2] == ["a", "c"]
    with pytest.raises(UsageError, match=r"predict returns a column digit, too; leave it out of --keep"):
        table_of({"digit": [torch.ones(1)]}, {"digit": [[1]]})
    with pytest.raises(UsageError, match="--keep id: its values have no common type"):
        table_of({}, {"id": [[1, "a"]]})


def test_outputs_that_a_file_cannot_hold() -> None:
    table = table_of({"digit": [torch.ones(2)], "scores": [torch.ones(2, 3)]}, {})
    with pytest.raises(UsageError, match=r"out.csv: a field of CSV cannot hold scores, float \(3,\); write .parquet"):
        refuse_columns(table.schema, Path("out.csv"))
    with pytest.raises(UsageError, match="out.npy holds one column, but there are digit, scores; write"):
        refuse_columns(table.schema, Path("out.npy"))
    with pytest.raises(UsageError, match="out.npz: NumPy cannot hold id, string; write .parquet"):
        refuse_columns(table_of({}, {"id": [["a"]]}).schema, Path("out.npz"))
    with pytest.raises(PredictError, match="predict returned complex64, which files and HTTP answers cannot hold"):
        table_of({"x": [torch.ones(2, dtype=torch.complex64)]}, {})
    for suffix in (".parquet", ".jsonl", ".npz"):
        refuse_columns(table.schema, Path(f"out{suffix}"))


def test_parts_continue_for_the_same_command_only(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    parts = Parts(output, {"run": "a", "batch size": 4}, block_rows=4)
    for number, rows in ((0, 4), (2, 4)):
        write_part(parts.folder / part_name(number, rows), table_of({"x": [torch.ones(rows)]}, {}))
    (parts.folder / part_name(1, 4)).write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"another process is writing .*out.parquet; wait for it"):
        Parts(output, {"run": "a", "batch size": 4}, block_rows=4)
    parts.close()

    again = Parts(output, {"run": "a", "batch size": 4}, block_rows=4)
    assert (again.note, again.find()) == ("", 8)
    numbers = again.missing()
    assert [next(numbers), next(numbers), next(numbers)] == [1, 3, 4]
    again.add(4, 1)  # the last block
    assert list(numbers) == []
    again.close()

    other = Parts(output, {"run": "a", "batch size": 8}, block_rows=8)
    assert (other.note, other.find()) == ("starting over: changed since the interrupted command: batch size", 0)
    other.remove()
    assert not other.folder.exists()
    following = Parts(output, {"run": "a", "batch size": 8}, block_rows=8)
    other.close()
    assert following.folder.exists()
    following.close()  # without rows
    assert not following.folder.exists()


CONFIG = {"cfg": {"seed": 0}, "datasets": {"_target_": "D", "train": {"_target_": "T"}, "test_b": {"_target_": "B"}}}


def test_the_rows_that_a_word_names(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [])
    assert select(CONFIG, None).title == "test_b"
    assert select(CONFIG, "train").node == {"_target_": "T"}
    assert select(CONFIG, str(path)).file == path
    text = "src.data.Digits(split=test, sizes=[1,2], name='a, (b)', n=3)"
    assert select(CONFIG, text).node == {
        **{"_target_": "src.data.Digits", "split": "test", "sizes": [1, 2]},
        **{"name": "a, (b)", "n": 3},
    }
    assert select(CONFIG, "src.data.Digits").node == select(CONFIG, "src.data.Digits()").node
    for word, error, message in (
        ("test_a", UsageError, r"the run has no dataset 'test_a', and there is no such file. Did you mean 'test_b'\?"),
        ("rows.csv", UsageError, "there is no file rows.csv"),
        (str(tmp_path), UsageError, "is not a file of rows"),
        ("src.data.Digits(split=", ConfigError, "is not understood; write a class path with arguments"),
        ("src.data.Digits(test)", ConfigError, "the override 'test' is not understood"),
        ("src.data.Digits(a=1,+b=2)", ConfigError, "'[+]b=2' in .* is not an argument; write name=value"),
    ):
        with pytest.raises(error, match=message):
            select(CONFIG, word)
    other = tmp_path / "rows.xlsx"
    other.touch()
    with pytest.raises(UsageError, match=r"files of rows end with .parquet, .jsonl, .ndjson, .csv, .npy, .npz"):
        select(CONFIG, str(other))


def test_an_archive_in_place_of_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr("image.txt", "x")
    with pytest.raises(UsageError, match=r"lacks image .*; its columns are image.txt"):
        open_rows(tmp_path / "rows.npz", [IMAGE], (), 4)


def test_the_rate_is_that_of_the_rows_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of those that an interrupted command has predicted, nor of the time to load the model."""
    monkeypatch.setattr(offline, "LINE_S", (0.0, 0.0))
    monkeypatch.setattr(offline, "time", SimpleNamespace(monotonic=lambda: 10.0))
    progress = offline.Progress("the model on rows")
    progress.begin(1_000_000, "")
    for number in (9, 10):
        progress.advance(offline.Block(number, 500, 1_002_000, 5.0 * (number - 9), ("image", "label")))
    progress.advance(offline.Block(11, 0, 1_002_000, 0.0, ("image", "label")))
    assert capsys.readouterr().err.splitlines() == [
        "predicting with the model on rows, continuing after 1,000,000 rows",
        "predict reads image, label",
        "1,000,500 rows, 50 rows/s, 100%, 30 s left",
        "1,001,000 rows, 100 rows/s, 100%, 10 s left",
    ]
