"""Batches from rows that are dicts, without `ray_map_batches`; errors name the row that does not match."""

from typing import Any

import numpy as np
import pytest
import torch
from test_loaders import shard
from torch.utils.data import Dataset

from mlx_runtime.data.batches import stack
from mlx_runtime.errors import DatasetError

pytestmark = pytest.mark.pure


def test_numbers_of_one_shape_are_stacked_and_the_rest_stays_as_it_is() -> None:
    rows = [
        {
            "tensor": torch.tensor([row, row], dtype=torch.bfloat16),
            "array": np.full((2, 1), row, np.uint8),
            "label": row,
            "score": row / 2,
            "tokens": [row, row + 1, row + 2],
            "mask": [True, False],
            "text": f"row {row}",
            "answers": {"start": [row]},
            "spans": [[1], [2, 3]],
            "unknown": None if row else 1,
            "words": ["a"] * (row + 1),
        }
        for row in range(2)
    ]
    batch = stack(rows, [4, 7], "train")
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "tensor": (torch.bfloat16, (2, 2)),
        "array": (torch.uint8, (2, 2, 1)),
        "label": (torch.int64, (2,)),
        "score": (torch.float32, (2,)),
        "tokens": (torch.int64, (2, 3)),
        "mask": (torch.bool, (2, 2)),
    }
    others = {key: value for key, value in batch.items() if key not in shapes}
    assert others == {key: [row[key] for row in rows] for key in ("text", "answers", "spans", "unknown", "words")}
    assert list(batch) == list(rows[0])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"x": [1, 2]}, r"datasets.train: row 9 has 'x' of shape \(2,\), but row 3 has \(3,\). Pad them with a `coll"),
        ({"y": [1, 2, 3]}, r"row 9 has the keys \['y'\], but row 3 has \['x'\]; return the same keys for all rows"),
        (([1, 2, 3], 1), "datasets.train has no ray_map_batches, and row 9 is a tuple. Return a dict, or add"),
    ],
)
def test_a_row_that_does_not_fit_is_named_in_one_line(odd: Any, message: str) -> None:
    rows = [{"x": [1, 2, 3]}, {"x": [4, 5, 6]}, odd]
    with pytest.raises(DatasetError, match=message) as caught:
        stack(rows, [3, 5, 9], "train")
    assert "\n" not in str(caught.value)


class Texts(Dataset):
    """Rows of 1 to 5 tokens, in a fixed order."""

    batch_size = 3

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.full((1 + index * 7 % 5,), index), "label": index}


class Padded(Texts):
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = torch.nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True, padding_value=-1)
        if tokens.shape[1] > 5:
            raise ValueError("a text is too long")
        return {"tokens": tokens, "label": torch.tensor([row["label"] for row in rows])}


def test_a_collate_of_the_dataset_pads_each_batch() -> None:
    seen = []
    for batch in shard(Padded()).iter_torch_batches():
        assert batch["tokens"].shape[1] == max(1 + row * 7 % 5 for row in batch["label"].tolist())
        seen += batch["label"].tolist()
    assert sorted(seen) == list(range(10))
