"""Checks of rows by a schema."""

import numpy as np
import pytest
import torch

from mlx_runtime.companions.serving.schema import Column, RowError, Schema

pytestmark = pytest.mark.pure

IMAGE = Column("image", "float32", (1, 2, 2))
SCHEMA = Schema((IMAGE, Column("tokens", "int64", (None,)), Column("text", "string"), Column("on", "bool")), ("label",))
ROW = {"image": [[[0, 1], [2, 3]]], "tokens": [4, 5], "text": "six", "on": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": [[[0, 1], [2]]]}, "image has lists of different lengths; expected float32 (1, 2, 2)"),
        ({"image": [[[0, 1], [2, "3"]]]}, "image[0][1][1] is '3'; expected float32 (1, 2, 2)"),
        ({"image": [[[0, 1], [2, float("nan")]]]}, "image holds NaN or infinity; expected finite numbers"),
        ({"tokens": [4, 5.5]}, "tokens is float64; expected int64 (any,)"),
        ({"tokes": [4]}, "there is no column 'tokes'. Did you mean 'tokens'?"),
    ],
)
def test_a_row_that_does_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(RowError) as caught:
        SCHEMA.row(ROW | change)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [ROW["image"], np.arange(4).reshape(1, 2, 2), torch.arange(4.0).view(1, 2, 2)])
def test_numbers_in_any_form_become_the_same_tensor(value: object) -> None:
    row = SCHEMA.row(ROW | {"image": value, "label": "ignored"})
    assert list(row) == ["image", "tokens", "text", "on"]
    assert torch.equal(row["image"], torch.arange(4.0).view(1, 2, 2))
    assert (row["image"].dtype, row["tokens"].dtype, row["text"], row["on"].dtype) == (
        torch.float32,
        torch.int64,
        "six",
        torch.bool,
    )


def test_rows_of_equal_shapes_share_a_batch_and_limits_split_it() -> None:
    rows = [ROW | {"tokens": list(range(length))} for length in (2, 3, 2, 2)]
    batches, errors = SCHEMA.batches([*rows[:2], {}, *rows[2:]], 2)
    assert [numbers for numbers, _ in batches] == [[0, 3], [4], [1]]
    assert [str(error)[:16] for error in errors] == ["None", "None", "image is missing", "None", "None"]
    assert [tuple(batch["tokens"].shape) for _, batch in batches] == [(2, 2), (1, 2), (1, 3)]
    assert batches[0][1]["text"] == ["six", "six"]
