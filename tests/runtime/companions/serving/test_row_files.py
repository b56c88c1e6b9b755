"""Files of rows that predictions are made for, and files of predictions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from mlx_runtime.companions.serving.predictions.parts import Parts, part_name
from mlx_runtime.companions.serving.predictions.results import join, table_of, write_part
from mlx_runtime.companions.serving.predictions.tables import FileRows, Rows
from mlx_runtime.companions.serving.schema import Column
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure

IMAGE = Column("image", "float32", (1, 2, 3))
NUMBERS = (Column("height", "float32"), Column("count", "int64"), Column("text", "string"), Column("wet", "bool"))

IMAGES = np.arange(20 * 6, dtype=np.float32).reshape(20, 1, 2, 3) / 7


def parquet_file(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=7)
    return path


def lines(path: Path, rows: Sequence[Any]) -> Path:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_text(text, errors="surrogateescape")
    return path


def read(
    path: Path, columns: Sequence[Column], parts: Sequence[tuple[int, int]], keep: Sequence[str] = ()
) -> list[Rows]:
    """Read parts of a file, given by their first row and number of rows."""
    file = FileRows(path, columns, keep, 4)
    return [file.read(start, count) for start, count in parts]


def test_numbers_and_texts_in_csv(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"id": ["007", "8"], "height": [1, 2.5], "count": [3, 4], "text": ["a,b", "c\nd"]})
    frame["wet"] = [True, False]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (rows,) = read(tmp_path / "rows.csv", NUMBERS, [(0, 8)], keep=["id"])
    assert (rows.size, rows.kept["id"].to_pylist()) == (2, ["007", "8"])
    assert {name: list(map(str, value)) for name, value in rows.columns.items()} == {
        "height": ["tensor(1.)", "tensor(2.5000)"],
        "count": ["tensor(3)", "tensor(4)"],
        "text": ["a,b", "c\nd"],
        "wet": ["tensor(True)", "tensor(False)"],
    }


BAD_ROWS = {
    "not JSON": ("{", "PATH: line 4 is not JSON: Expecting property name enclosed in double quotes"),
    "missing": ({"label": 1}, "PATH: row 2: image is null; expected float32 (1, 2, 3)"),
    "NaN": ({"image": [[[1, 2, 3], [4, 5, None]]]}, "PATH: row 2: image[0][1][2] is null; expected float32 (1, 2, 3)"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    row, message = BAD_ROWS[name]
    good = {"image": IMAGES[0].tolist()}
    path = lines(tmp_path / "rows.jsonl", [good, "", good, row, good])
    with pytest.raises(UsageError) as caught:
        read(path, [IMAGE], [(0, 1), (1, 3)])
    assert str(caught.value).startswith(message.replace("PATH", str(path)))
    assert "\n" not in str(caught.value)


def test_the_files_of_a_folder_may_differ_in_types(tmp_path: Path) -> None:
    names = pa.array(["a", "b"])
    parquet_file(tmp_path / "0.parquet", height=[1, 2], id=names.dictionary_encode())
    parquet_file(tmp_path / "1.parquet", height=[2.5, 3.0], id=names)
    for hidden in (".2.parquet", "_delta_log/2.parquet"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        parquet_file(tmp_path / hidden, version=[1])
    (rows,) = read(tmp_path, NUMBERS[:1], [(0, 9)], keep=["id"])
    assert rows.columns["height"].tolist() == [1, 2, 2.5, 3]
    assert rows.kept["id"].to_pylist() == ["a", "b", "a", "b"]
    parquet_file(tmp_path / "2.parquet", width=[1])
    with pytest.raises(UsageError, match=r"2.parquet lacks height \(float32\); its columns are width"):
        read(tmp_path, NUMBERS[:1], [(0, 9)])


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.csv", "a.jsonl", "none.parquet"):
        if name.startswith("a"):
            (tmp_path / name).write_bytes(b"\x00\xff\xfe binary\n\x80,\n")
        with pytest.raises(UsageError, match=name) as caught:
            read(tmp_path / name, [IMAGE], [(0, 1)])
        assert "\n" not in str(caught.value)


def test_missing_columns(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "rows.parquet", picture=[1], id=[2])
    with pytest.raises(UsageError) as caught:
        read(path, [IMAGE], [])
    assert str(caught.value) == f"{path} lacks image (float32 (1, 2, 3)); its columns are picture, id"
    with pytest.raises(UsageError, match=r"lacks ids, named by --keep. Did you mean 'id'\?"):
        read(path, [Column("picture", "int64")], [], keep=["ids"])
    (tmp_path / "rows.csv").write_text("image\n1\n")
    with pytest.raises(UsageError, match=r"CSV cannot hold image, float32 \(1, 2, 3\); use Parquet"):
        read(tmp_path / "rows.csv", [IMAGE], [])


def test_columns_that_occur_twice(tmp_path: Path) -> None:
    """Which of them `predict` should read is not known."""
    parquet.write_table(pa.table([[1], [2], [3]], ["id", "count", "count"]), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("id,count,count\n1,2,3\n")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "count": 2, "count": 3}\n')
    for suffix in (".parquet", ".csv", ".jsonl"):
        with pytest.raises(UsageError, match=r"2 columns count; rename|Column\(/count\) was specified twice in row 0"):
            read(tmp_path / f"rows{suffix}", [Column("count", "int64")], [(0, 1)])


OUTPUTS = {
    "digit": torch.arange(5),
    "scores": torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7,
    "mask": torch.arange(30).reshape(5, 2, 3) % 2 == 0,
    "half": torch.arange(5, dtype=torch.bfloat16) / 3,
    "boxes": torch.zeros(5, 0, 4),
}


def joined(folder: Path, suffix: str, *blocks: Sequence[Any], keep: Sequence[str] = ()) -> Path:
    """Write the outputs of blocks, each a list of tables or of batches, and join them."""
    paths = []
    for number, batches in enumerate(blocks):
        paths.append(folder / f"{number}.arrow")
        found = [batch if isinstance(batch, pa.Table) else table_of(batch, {}) for batch in batches]
        write_part(paths[-1], found, keep)
    join(paths, folder / f"out{suffix}", folder / "temporary", keep)
    assert not (folder / "temporary").exists()
    return folder / f"out{suffix}"


def test_parquet_holds_all_outputs(tmp_path: Path) -> None:
    blocks = [[{name: value[part] for name, value in OUTPUTS.items()}] for part in (slice(0, 3), slice(3, 5))]
    path = joined(tmp_path, ".parquet", *blocks)
    frame, table = pandas.read_parquet(path), parquet.read_table(path)
    assert frame["digit"].dtype == np.int64
    assert np.array_equal(np.stack(frame["scores"]), OUTPUTS["scores"])
    assert np.array_equal(np.stack(frame["mask"]).reshape(-1, 2, 3), OUTPUTS["mask"])
    assert table.schema.field("mask").type.shape == [2, 3]
    assert np.array_equal(frame["half"], OUTPUTS["half"].float())
    assert table["boxes"].to_pylist() == [[]] * 5


def test_json_lines(tmp_path: Path) -> None:
    first, second = ({name: OUTPUTS[name][part] for name in ("digit", "mask")} for part in (slice(3), slice(3, 5)))
    path = joined(tmp_path, ".jsonl", [first, second], [first])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["digit"] for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows[1]["mask"] == OUTPUTS["mask"][1].tolist()
    path = joined(tmp_path, ".jsonl", [{"x": torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])}])
    assert path.read_text() == '{"x": [1.0, null]}\n{"x": [null, 2.0]}\n'


def test_outputs_of_different_shapes_are_lists_of_any_length(tmp_path: Path) -> None:
    first, second = {"x": torch.ones(2, 3)}, {"x": [torch.zeros(1), torch.zeros(2)]}
    path = joined(tmp_path, ".parquet", [first, second], [{"x": torch.ones(1, 1)}])
    assert pandas.read_parquet(path)["x"].map(list).tolist() == [[1, 1, 1], [1, 1, 1], [0], [0, 0], [1]]


def test_parts_continue_for_the_same_command_only(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    parts = Parts(output, {"run": "a", "batch size": 4})
    for number, rows in ((0, 4), (2, 4)):
        write_part(parts.folder / part_name(number, rows), [table_of({"x": torch.ones(rows)}, {})])
    with pytest.raises(UsageError, match=r"another process is writing .*out.parquet; wait for it"):
        Parts(output, {"run": "a", "batch size": 4})
    parts.close()

    again = Parts(output, {"run": "a", "batch size": 4})
    assert (again.note, again.finished) == ("", {0: 4, 2: 4})
    again.close()

    other = Parts(output, {"run": "a", "batch size": 8})
    assert (other.note, other.finished) == ("starting over: changed since the interrupted command: batch size", {})
    other.close()  # without rows
    assert not other.folder.exists()
